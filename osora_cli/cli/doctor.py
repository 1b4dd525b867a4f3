"""`osora doctor`: what this machine can do."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples
from osora_cli.cli.output import Output, guarded

if TYPE_CHECKING:
    from osora_cli.app.doctor.finding import Finding

_WIDTH = 80


@guarded
def doctor(
    outputs: Annotated[
        str, typer.Option("--outputs", metavar="DIR", help="Where runs are to go: its disk is measured.")
    ] = "outputs",
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Look at this machine: torch, GPU, conv3d, decoder, disk, limits, optional parts.

    Each finding comes with its cure. Exit code 5 when something fails that a training needs.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.doctor.run import diagnose
    from osora_cli.errors import SetupError

    found = diagnose(Path(outputs), lambda name: output.note(f"looking at {name}"))
    lines = [line for finding in found.findings for line in finding_lines(finding)]
    output.result(found.to_json(), lines)
    return 0 if found.healthy else SetupError.exit_code


def finding_lines(finding: Finding) -> list[str]:
    """`status  name: text`, and the cure below it; at most 80 columns where words allow it."""
    lines = _wrapped(f"{finding.status:<7} {finding.name}: {finding.text}", " " * 10)
    if finding.cure:
        lines += _wrapped(f"        fix: {finding.cure}", " " * 13)
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "doctor",
        short_help="What this machine can do, and what to cure.",
        epilog=examples("osora doctor", "osora doctor --outputs /data/runs --json"),
    )(doctor)
