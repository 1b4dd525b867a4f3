"""`osora train ...`: trainings from a config."""

from __future__ import annotations

from typing import Annotated

import typer

from osora_cli.cli.configured import load_for, print_plain_config
from osora_cli.cli.options import ConfigArgument, Debug, Json, PrintConfig, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import train_lines
from osora_cli.errors import UsageError

app = new_app("Train a model.")


@app.command(
    "vae",
    epilog=examples(
        "osora train vae --dataset.data-path clips.csv --async-io",
        "osora train vae my.yaml --max-steps 1000 --lr 5e-5",
        "osora train vae --load outputs/RUN/epoch*-global_step*",
        fields_of="train-vae",
    ),
)
@guarded
def vae(
    ctx: typer.Context,
    config: ConfigArgument = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto", help="Go on if the run exists (needs --exp-name), else start."),
    ] = None,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a video autoencoder.

    CONFIG may be left out: then it is the preset vae/train/video_dc_ae.
    """
    output = Output(json_mode, quiet, debug)
    if resume not in (None, "auto"):
        raise UsageError(
            f"`--resume` is `{resume}`",
            where="--resume",
            allowed="auto",
            hint=f"to go on with a run: `osora resume {resume}`",
        )
    from osora_cli.config.schema import TrainVaeConfig

    loaded = load_for(ctx, "train vae", TrainVaeConfig, config, output)
    if show_config:
        print_plain_config(loaded.config, "train vae", loaded.path, output)
        return
    from osora_cli.app.train import train_vae

    result = train_vae(
        loaded.config,
        config_name=loaded.name,
        resume_auto=resume == "auto",
        quiet=quiet,
        json_mode=json_mode,
    )
    payload = result.to_json()
    output.result(payload, train_lines(payload))
