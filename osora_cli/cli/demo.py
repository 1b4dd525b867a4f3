"""`osora demo`: the whole path on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import demo_lines


@guarded
def demo(
    directory: Annotated[
        str, typer.Option("--dir", metavar="D", help="An empty or new folder for all that the demo makes.")
    ] = "osora-demo",
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The whole path in minutes, without a GPU.

    Clips, table, an autoencoder trained, killed in a save, resumed and verified, its
    second stage, reconstruction; then a diffusion model on it: latents cached, trained,
    killed, resumed, verified, sampled. Ends in a table and two pictures.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.demo.run import run_demo

    payload = run_demo(Path(directory), quiet=quiet or json_mode, tell=output.note).to_json()
    output.result(payload, demo_lines(payload))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "demo",
        short_help="The whole path on this machine, in minutes.",
        epilog=examples("osora demo", "osora demo --dir my-demo"),
    )(demo)
