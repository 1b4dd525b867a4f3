"""`osora resume`: going on with a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osora_cli.cli.configured import is_rank, launch_here, overrides_of, print_plain_config
from osora_cli.cli.options import Debug, Json, Nproc, PrintConfig, Quiet, examples
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import train_lines

if TYPE_CHECKING:
    from osora_cli.config.freeze import Frozen
    from osora_cli.config.overrides import Override


@guarded
def resume(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RUN_OR_CKPT", help="A run's folder, or one of its checkpoints.")],
    nproc: Nproc = None,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Go on with a run: its own config, its newest checkpoint that verifies, the rest of it.

    Settings that leave the model and the optimizer as they are may be changed on the way.
    """
    output = Output(json_mode, quiet, debug)
    overrides = overrides_of(ctx)
    if show_config:
        frozen = _frozen(Path(target), overrides)
        print_plain_config(frozen.config, frozen.command.name, frozen.path, output)
        return 0
    if nproc is not None and not is_rank():
        return launch_here(nproc)
    from osora_cli.app.resume import resume as resume_run

    payload = resume_run(Path(target), overrides, quiet=quiet, json_mode=json_mode).to_json()
    output.result(payload, train_lines(payload))
    return 0


def _frozen(target: Path, overrides: list[Override]) -> Frozen:
    """The config that a resume of `target` would run with."""
    from osora_cli.config.freeze import JSON_NAME, YAML_NAME, check_resume, thaw

    is_run = any((target / name).is_file() for name in (YAML_NAME, JSON_NAME))
    run = target if is_run else target.parent
    frozen = thaw(run, overrides)
    check_resume(thaw(run).config, frozen.config)
    return frozen


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "resume",
        short_help="Go on with a run where it stopped.",
        epilog=examples(
            "osora resume outputs/RUN",
            "osora resume outputs/RUN --max-steps 20000 --lr 1e-5",
            "osora resume outputs/RUN/epoch0-global_step3000",
            fields_of="train-vae",
        ),
    )(resume)
