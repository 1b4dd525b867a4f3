"""`osora config ...`: the schema of configs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded

if TYPE_CHECKING:
    from osora_cli.config.fields import FieldSpec
    from osora_cli.config.registry import Command

app = new_app("What a config may hold.")
_WIDTH = 80


@app.command(
    "show",
    epilog=examples(
        "osora config show train-vae",
        "osora config show train-vae optim",
        "osora config show infer-reconstruct --json",
    ),
)
@guarded
def show(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", show_default=False, help="train-vae or infer-reconstruct.")
    ] = "",
    section: Annotated[
        str, typer.Argument(metavar="SECTION", show_default=False, help="Only this section or key, such as optim.")
    ] = "",
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the fields of a config: key, type, default and help. Each is an option of the command too."""
    output = Output(json_mode, quiet, debug)
    from osora_cli.config.registry import COMMANDS

    if not command:
        names = [name.replace(" ", "-") for name in COMMANDS]
        output.result({"commands": names}, [f"osora config show {name}" for name in names])
        return
    found = _command(command)
    specs = _specs(found, section)
    payload = {"command": found.name, "default": found.default, "fields": [_row(spec) for spec in specs]}
    output.result(payload, _lines(found, specs))


@app.command(
    "convert",
    epilog=examples(
        "osora config convert configs/vae/train/video_dc_ae.py dc_ae.yaml",
        "osora config convert stage1.py --command train-diffusion",
    ),
)
@guarded
def convert(
    source: Annotated[str, typer.Argument(metavar="A.py", show_default=False, help="An Open-Sora config.")],
    target: Annotated[
        str | None, typer.Argument(metavar="B.yaml", show_default=False, help="New file; left out: to stdout.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", metavar="COMMAND", help="Whose config it is; left out: told by its keys.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace B.yaml if it is there.")] = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Turn an Open-Sora Python config into YAML, its bases merged in, and check it.

    The config is parsed, never executed.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.config.convert import convert_config, write_new

    converted = convert_config(Path(source), None if command is None else _command(command))
    for note in converted.notes:
        output.note(note)
    if target is not None:
        write_new(Path(target), converted.yaml, replace=force)
    payload = {
        "schema_version": 1,
        "command": converted.command.name,
        "config": converted.values,
        "path": target,
    }
    told = f"{target}: a config of `osora {converted.command.name}`"
    output.result(payload, converted.yaml.rstrip("\n") if target is None else told)


def _command(name: str) -> Command:
    from osora_cli.config.registry import COMMANDS
    from osora_cli.errors import UsageError

    wanted = name.replace("-", " ").replace("_", " ")
    if wanted not in COMMANDS:
        raise UsageError(
            f"`{name}` is no command with a config", allowed=", ".join(n.replace(" ", "-") for n in COMMANDS)
        )
    return COMMANDS[wanted]


def _specs(command: Command, section: str) -> list[FieldSpec]:
    from osora_cli.config.fields import nearest, walk
    from osora_cli.errors import UsageError

    wanted = section.lstrip("-").replace("-", "_")
    specs = [s for s in walk(command.schema) if not wanted or s.key == wanted or s.key.startswith(f"{wanted}.")]
    if not specs:
        near = nearest(wanted, [command.schema])
        raise UsageError(f"`{section}` is not a key of this config", hint=f"did you mean `{near}`?" if near else None)
    return specs


def _row(spec: FieldSpec) -> dict[str, Any]:
    return {
        "key": spec.key,
        "type": spec.type_text,
        "default": spec.default,
        "required": spec.required,
        "help": spec.help,
    }


def _lines(command: Command, specs: list[FieldSpec]) -> list[str]:
    from osora_cli.config.fields import sections_of

    lines = [f"# osora {command.name}: the keys of its config, each an option too (--optim.lr 1e-5)"]
    at_top = True
    for spec in specs:
        if sections_of(spec.annotation):
            lines += ["", f"{spec.key}: {spec.help}"]
            at_top = False
            continue
        if len(spec.path) == 1 and not at_top:
            lines.append("")
            at_top = True
        lines += _field_lines(spec)
    return lines


def _field_lines(spec: FieldSpec) -> list[str]:
    from osora_cli.config.freeze import plain_text

    default = "required" if spec.required else f"default {plain_text(spec.default)}"
    head = f"  {spec.key}  ({spec.type_text}; {default})"
    texts = (textwrap.wrap(head, _WIDTH, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False),)
    help_lines = textwrap.wrap(spec.help, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [*texts[0], *help_lines]
