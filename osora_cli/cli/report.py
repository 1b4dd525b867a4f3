"""`osora report`: what a run has done so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import table


@guarded
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    output_folder: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", show_default=False, help="Where to write. Default: RUN/report."),
    ] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Plot a run (losses, validation PSNR, learning rate, save stalls) and say whether its loss still falls.

    Writes PNG files and one HTML page that needs no other file. Works while the run goes on.
    """
    from osora_cli.app.run_report import report_run

    result = report_run(Path(run), Path(output_folder) if output_folder is not None else None)
    lines = [result.verdict, "", *table([*result.facts, ("page", result.page)])]
    Output(json_mode, quiet, debug).result(result.to_json(), lines)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "report",
        short_help="Plots of a run, and whether its loss still falls.",
        epilog=examples(
            "osora report outputs/RUN",
            "osora report outputs/RUN --output plots/",
            "osora report outputs/RUN --json",
        ),
    )(report)
