"""`osora ckpt ...`: checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.progress import Progress
from osora_cli.cli.results import verify_lines
from osora_cli.cli.results_ckpt import export_lines, list_lines, prune_lines

app = new_app("Look at checkpoints, export them, remove old ones.")


@app.command(
    "verify",
    epilog=examples(
        "osora ckpt verify outputs/RUN",
        "osora ckpt verify outputs/RUN/epoch0-global_step3000 --quick",
        "osora ckpt verify outputs/RUN/epoch0-global_step3000 --deep",
        "osora ckpt verify outputs/RUN --json",
    ),
)
@guarded
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or the folder of a run.")],
    quick: Annotated[bool, typer.Option("--quick", help="Structure only: the tensors' bytes are not read.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Look at the values too: finite, masters and EMA fit, not a stale copy.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="What could not be proven byte by byte fails too.")] = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Say whether a checkpoint is whole and every byte of it right.

    Of a run, every checkpoint, and the one that a resume would take. Ends with 4 when something is wrong.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.ckpt.verify import verify_path

    progress = Progress(output, "verify", "bytes")
    try:
        result = verify_path(Path(path), quick=quick, deep=deep, strict=strict, progress=progress)
    finally:
        progress.close()
    payload = result.to_json()
    output.result(payload, verify_lines(payload))
    return result.exit_code


@app.command("list", epilog=examples("osora ckpt list outputs/RUN", "osora ckpt list outputs/RUN --json"))
@guarded
def list_(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """List the checkpoints of a run: verdict by structure, size, age, contents.

    The tensors' bytes are not read: `osora ckpt verify` does that.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.ckpt.list import list_run

    payload = list_run(Path(run)).to_json()
    output.result(payload, list_lines(payload))
    return 0


@app.command(
    "export",
    epilog=examples(
        "osora ckpt export outputs/RUN model.safetensors",
        "osora ckpt export outputs/RUN model.safetensors --weights ema --dtype bf16",
        "osora ckpt export outputs/RUN hf-model/ --shard-gb 2",
    ),
)
@guarded
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint, or a run: its newest good one.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A file NAME.safetensors, or a folder for Hugging Face's layout.")
    ],
    weights: Annotated[
        str,
        typer.Option(help="auto, ema, model, master or discriminator; auto: EMA, else masters, else the weights."),
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="same, fp32, bf16 or fp16.")] = "same",
    shard_gb: Annotated[float, typer.Option(help="Largest file of a folder, GB.")] = 5.0,
    force: Annotated[
        bool, typer.Option("--force", help="Export what does not verify, as far as it can be read.")
    ] = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Write the weights of a checkpoint as one safetensors file, or as a folder in Hugging Face's layout.

    Every byte of the checkpoint is verified first.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.ckpt.export import export as run_export

    progress = Progress(output, "export", "bytes")
    try:
        result = run_export(
            Path(checkpoint),
            Path(out),
            weights=weights,  # type: ignore[arg-type]  # checked there
            dtype=dtype,  # type: ignore[arg-type]
            shard_gb=shard_gb,
            force=force,
            progress=progress,
        )
    finally:
        progress.close()
    for note in result.notes:
        output.note(note)
    payload = result.to_json()
    output.result(payload, export_lines(payload))
    return 0


@app.command(
    "prune",
    epilog=examples(
        "osora ckpt prune outputs/RUN --keep-n-latest 3",
        "osora ckpt prune outputs/RUN --keep-n-latest 3 --keep-every 10000 --yes",
    ),
)
@guarded
def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    keep_n_latest: Annotated[
        int | None,
        typer.Option(help="Good checkpoints that stay, at least 1. Default: the run's own.", show_default=False),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(help="Keep the first of every so many updates too. Default: the run's own.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Verify what stays by structure only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this it only says what it would do.")] = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Remove old checkpoints of a run; without `--yes` only say which.

    Never the newest that verifies, permanent ones, what does not verify, or pictures in eval/.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.ckpt.prune import prune as run_prune

    progress = Progress(output, "verify", "bytes")
    try:
        result = run_prune(
            Path(run), keep_n_latest=keep_n_latest, keep_every=keep_every, quick=quick, yes=yes, progress=progress
        )
    finally:
        progress.close()
    payload = result.to_json()
    output.result(payload, prune_lines(payload))
    return 0
