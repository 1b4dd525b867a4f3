"""An Open-Sora `.py` config as YAML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.config.freeze import values_to_yaml
from osora_cli.config.layers import read_layers, shown_name
from osora_cli.config.load import check
from osora_cli.config.registry import COMMANDS, Command
from osora_cli.errors import ConfigError, SetupError, UsageError


@dataclass(frozen=True)
class Converted:
    """A config's own values with those of its bases, and whose config it is."""

    command: Command
    values: dict[str, Any]
    yaml: str
    notes: list[str] = field(default_factory=list)


def convert_config(path: Path, command: Command | None = None) -> Converted:
    """Read the config at `path` with its bases and check it.

    Args:
        command: whose config it is; None: the command whose keys fit best.

    Raises ConfigError for a file that is missing or no config, and for all that the command's schema finds wrong.
    """
    if not path.is_file():
        raise ConfigError(f"the config `{path}` does not exist", where="A.py")
    layer = read_layers(path)
    notes = []
    if command is None:
        command = likely_command(layer.data)
        notes.append(f"by its keys a config of `osora {command.name}`")
    check(layer, command.schema, "the config")
    title = f"osora {command.name}, converted from {shown_name(path)}"
    return Converted(command, layer.data, values_to_yaml(layer.data, title), notes)


def likely_command(keys: Iterable[str]) -> Command:
    """The command that knows most of the keys, and of several the one with the fewest keys of its own."""
    have = set(keys)
    return min(
        COMMANDS.values(), key=lambda c: (len(have - set(c.schema.model_fields)), len(set(c.schema.model_fields)))
    )


def write_new(path: Path, text: str, *, replace: bool) -> None:
    """Write a file that is not there yet. Raises UsageError where it is, SetupError where it cannot be written."""
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"`{path}` is no name of a YAML file", where="B.yaml", allowed=".yaml, .yml")
    try:
        with path.open("w" if replace else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"`{path}` exists already", where="B.yaml", hint="`--force` replaces it") from None
    except OSError as error:
        raise SetupError(f"`{path}` cannot be written: {error.strerror}", where="B.yaml") from error
