"""Options that many commands share, and the words of their help."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Output"

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=_PANEL)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No notes and no progress.", rich_help_panel=_PANEL)]
Debug = Annotated[bool, typer.Option("--debug", help="Errors with their traceback.", rich_help_panel=_PANEL)]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the resolved config, itself a valid config, and end.", rich_help_panel=_PANEL
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", show_default=False, help="Train in N processes of this machine, one a GPU."),
]
ConfigArgument = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG", show_default=False, help="A YAML file, or the name of a preset."),
]


def new_app(help_text: str) -> typer.Typer:
    """A group of commands with the settings that all groups have."""
    return typer.Typer(
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def examples(*lines: str, fields_of: str | None = None) -> str:
    """The end of a help text: lines that can be typed, and for a command with a config where its fields are listed."""
    blocks = [["Examples:", *(f"  {line}" for line in lines)]]
    if fields_of:
        blocks.append(
            [
                "Every field of the config is an option too:",
                "  --lr 1e-5   --dataset.data-path T.csv   --optim.betas '[0.9, 0.98]'",
                "  --async-io  --async-io False  --no-async-io",
                f"  osora config show {fields_of}  lists them",
            ]
        )
    # \b keeps the lines of a block as they are.
    return "\n\n".join("\b\n" + "\n".join(block) for block in blocks)
