"""`osora train ...`: trainings from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from osora_cli.cli.configured import is_rank, launch_here, load_for, print_plain_config
from osora_cli.cli.options import ConfigArgument, Debug, Json, Nproc, PrintConfig, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import train_lines
from osora_cli.errors import UsageError

if TYPE_CHECKING:
    from osora_cli.config.load import Loaded
    from osora_cli.config.schema import TrainConfig

app = new_app("Train a model.")

ResumeAuto = Annotated[
    str | None,
    typer.Option("--resume", metavar="auto", help="Go on if the run exists (needs --exp-name), else start."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what it would take: memory, batches, checkpoints. Needs no GPU.")
]


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
    resume: ResumeAuto = None,
    nproc: Nproc = None,
    dry_run: DryRun = False,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train a video autoencoder.

    CONFIG may be left out: then it is the preset vae/train/video_dc_ae.
    """
    from osora_cli.config.schema import TrainVaeConfig

    return _train(
        ctx, "train vae", TrainVaeConfig, config, resume, nproc, dry_run, show_config, Output(json_mode, quiet, debug)
    )


@app.command(
    "vae-disc",
    epilog=examples(
        "osora train vae-disc --from-pretrained outputs/RUN --dataset.data-path T.csv",
        "osora train vae-disc my.yaml --from-pretrained vae.safetensors",
        "osora train vae-disc --load outputs/RUN/epoch*-global_step*",
        fields_of="train-vae-disc",
    ),
)
@guarded
def vae_disc(
    ctx: typer.Context,
    config: ConfigArgument = None,
    resume: ResumeAuto = None,
    nproc: Nproc = None,
    dry_run: DryRun = False,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train a video autoencoder further, against a discriminator: the second stage.

    --from-pretrained takes the weights of the first stage: a run, a checkpoint in it, or a file. --load goes on with a
    second stage. CONFIG may be left out: then it is the preset vae/train/video_dc_ae_disc.
    """
    from osora_cli.config.vae_disc import TrainVaeDiscConfig

    return _train(
        ctx,
        "train vae-disc",
        TrainVaeDiscConfig,
        config,
        resume,
        nproc,
        dry_run,
        show_config,
        Output(json_mode, quiet, debug),
    )


@app.command(
    "diffusion",
    epilog=examples(
        "osora train diffusion stage1 --dataset.data-path clips.csv --async-io",
        "osora train diffusion stage1_i2v --from-pretrained Open_Sora_v2.safetensors",
        "osora train diffusion stage1 --load outputs/RUN/epoch*-global_step*",
        fields_of="train-diffusion",
    ),
)
@guarded
def diffusion(
    ctx: typer.Context,
    config: ConfigArgument = None,
    resume: ResumeAuto = None,
    nproc: Nproc = None,
    dry_run: DryRun = False,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train a diffusion transformer on an autoencoder's latents.

    --ae.from-pretrained takes an autoencoder of one's own as well: a run of `osora train vae`, or a checkpoint in it.
    CONFIG may be left out: then it is the preset diffusion/train/image.
    """
    from osora_cli.config.diffusion import TrainDiffusionConfig

    return _train(
        ctx,
        "train diffusion",
        TrainDiffusionConfig,
        config,
        resume,
        nproc,
        dry_run,
        show_config,
        Output(json_mode, quiet, debug),
    )


def _train(
    ctx: typer.Context,
    command: str,
    schema: type[TrainConfig],
    config: str | None,
    resume: str | None,
    nproc: int | None,
    dry_run: bool,
    show_config: bool,
    output: Output,
) -> int:
    """Load the config, train, and say how it ended. Gives the exit code."""
    if resume not in (None, "auto"):
        raise UsageError(
            f"`--resume` is `{resume}`",
            where="--resume",
            allowed="auto",
            hint=f"to go on with a run: `osora resume {resume}`",
        )
    loaded = load_for(ctx, command, schema, config, output)
    if show_config:
        print_plain_config(loaded.config, command, loaded.path, output)
        return 0
    if dry_run:
        _plan(command, loaded, nproc or 1, output)
        return 0
    if nproc is not None and not is_rank():
        return launch_here(nproc)
    from osora_cli.app.train import train

    result = train(
        command,
        loaded.config,
        config_name=loaded.name,
        resume_auto=resume == "auto",
        quiet=output.quiet,
        json_mode=output.json_mode,
    )
    payload = result.to_json()
    output.result(payload, train_lines(payload))
    return 0


def _plan(command: str, loaded: Loaded[TrainConfig], ranks: int, output: Output) -> None:
    """What the training would take."""
    from osora_cli.app.dry_run.run import dry_run as plan_run
    from osora_cli.cli.dry_run import dry_run_lines

    found = plan_run(command, loaded.config, config_name=loaded.name, ranks=ranks, tell=output.note)
    for line in found.notes:
        output.note(line)
    payload = found.to_json()
    output.result(payload, dry_run_lines(payload))
