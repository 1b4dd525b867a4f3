"""What commands with a config share: loading it with the command line's values, and printing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from osora_cli.cli.output import Output

if TYPE_CHECKING:
    from osora_cli.config.base import Section
    from osora_cli.config.load import Loaded
    from osora_cli.config.overrides import Override

S = TypeVar("S", bound="Section")


def overrides_of(ctx: typer.Context) -> list[Override]:
    """The values for the config that stood in argv; `main` took them out before Typer saw it."""
    return list(ctx.obj or ())


def load_for(ctx: typer.Context, command: str, schema: type[S], config: str | None, output: Output) -> Loaded[S]:
    """The checked config of a command; what is worth knowing about it goes to stderr."""
    from osora_cli.config.load import load_config
    from osora_cli.config.registry import COMMANDS

    loaded = load_config(config, schema, overrides_of(ctx), default=COMMANDS[command].default)
    for note in loaded.notes:
        output.note(note)
    return loaded


def print_plain_config(config: Section, command: str, path: Path, output: Output) -> None:
    """The resolved config on stdout, as YAML that is itself a valid config, or as JSON."""
    from osora_cli.config.freeze import to_plain, to_yaml
    from osora_cli.config.layers import shown_name

    title = f"osora {command}, resolved from {shown_name(path)}"
    payload = {"command": command, "path": str(path), "config": to_plain(config)}
    output.result(payload, to_yaml(config, title).rstrip("\n"))


def is_rank() -> bool:
    """Whether a launcher has started this process as one of a run's ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_here(processes: int) -> int:
    """This very command line in several processes; gives the exit code."""
    from osora_cli.app.launch import launch

    return launch(sys.argv[1:], processes)
