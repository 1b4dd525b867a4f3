"""`osora data ...`: tables of clips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osora_cli.cli.configured import load_for, overrides_of
from osora_cli.cli.options import ConfigArgument, Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.progress import Progress
from osora_cli.cli.results import SHOWN, meta_lines
from osora_cli.cli.results_data import cache_lines, latent_lines
from osora_cli.errors import UsageError

if TYPE_CHECKING:
    from osora_cli.config.diffusion import TrainDiffusionConfig

app = new_app("Make tables of clips.")


@app.command(
    "meta",
    epilog=examples(
        "osora data meta --input clips.csv --output clips_meta.csv",
        "osora data meta --input folder/ --output clips_meta.csv --num-workers 16",
        "osora data meta --input clips.csv --output clips_meta.csv --merge scores.csv",
    ),
)
@guarded
def meta(
    source: Annotated[
        str, typer.Option("--input", metavar="A", help="A table with columns path and text, or a folder of clips.")
    ],
    target: Annotated[str, typer.Option("--output", metavar="B", help="The table to write, CSV or parquet.")],
    num_workers: Annotated[int, typer.Option("--num-workers", min=0, help="Processes that look at clips.")] = 4,
    root: Annotated[
        str | None, typer.Option("--root", metavar="DIR", help="Folder that relative paths are tried in last.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Decode every clip: slow, right for damaged files.")] = False,
    merge: Annotated[
        list[str] | None,
        typer.Option("--merge", metavar="TABLE", help="Join the columns of this table by path. May be given again."),
    ] = None,
    on_error: Annotated[
        str | None,
        typer.Option(
            "--on-error",
            metavar="ACT",
            show_default=False,
            help="A clip that cannot be read: skip leaves it out, keep leaves it empty, fail ends the command. "
            "Default: skip, but nothing is left out of a table that is written over itself.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", help="Seconds that looking at one clip may take.")
    ] = 60.0,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Add num_frames, height, width, aspect_ratio, resolution and fps to a table of clips.

    A clip that cannot be read is counted and named with the reason; --on-error says
    what becomes of it: skip, keep or fail.
    """
    output = Output(json_mode, quiet, debug)
    if on_error not in (None, "skip", "keep", "fail"):
        raise UsageError(f"`--on-error` is `{on_error}`", where="--on-error", allowed="skip, keep, fail")
    if not time_limit > 0:
        raise UsageError(f"`--time-limit` is `{time_limit}`", where="--time-limit", allowed="more than 0 s")
    from osora_cli.app.data.meta import make_meta

    progress = Progress(output, "data meta", "clips")
    try:
        result = make_meta(
            Path(source),
            Path(target),
            num_workers=num_workers,
            root=None if root is None else Path(root),
            exact=exact,
            merge=[Path(source) for source in merge or ()],
            on_error=on_error,
            time_limit_s=time_limit,
            progress=progress,
        )
    finally:
        progress.close()
    for note in result.notes:
        output.note(note)
    what = "left empty" if on_error == "keep" else "left out"
    for path, reason in result.bad[:SHOWN]:
        output.note(f"{what}: {path}: {reason}")
    if len(result.bad) > SHOWN:
        output.note(f"{what}: {len(result.bad) - SHOWN} more")
    report = None if result.bad_report is None else str(result.bad_report)
    payload = {
        "output": str(result.output),
        "rows": result.rows,
        "looked_at": result.probed,
        "bad": [{"path": path, "reason": reason} for path, reason in result.bad],
        "bad_report": report,
        "notes": list(result.notes),
        "seconds": round(result.seconds, 3),
    }
    lines = meta_lines(result.rows, str(result.output), result.seconds, {what: len(result.bad)}, report)
    output.result(payload, lines)


@app.command(
    "check",
    epilog=examples(
        "osora data check clips.csv vae/train/video_dc_ae --ranks 8",
        "osora data check clips.csv my.yaml --clips-out clips_checked.csv",
        "osora data check clips.csv my.yaml --dataset.fps-max 24",
        fields_of="train-vae",
    ),
)
@guarded
def check(
    ctx: typer.Context,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table that `osora data meta` has filled.")],
    config: ConfigArgument = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes that read different clips.")] = 1,
    epoch: Annotated[int, typer.Option("--epoch", min=0, help="Which epoch, counted from 0.")] = 0,
    no_files: Annotated[bool, typer.Option("--no-files", help="Do not look whether the files exist.")] = False,
    clips_out: Annotated[
        str | None, typer.Option("--clips-out", metavar="CSV", help="Write a line for every clip: bucket or reason.")
    ] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Show what a training makes of a table: its buckets, batches, and the clips left out.

    For each bucket: clips, batches of an epoch, and its share of the cost. For each
    clip that is left out: the reason. CONFIG is that of any training. Ends with
    exit code 3 where a training would end before its model is built.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.data.check import check_table, load_training_config

    command, loaded = load_training_config(config, overrides_of(ctx))
    for note in loaded.notes:
        output.note(note)
    out = None if clips_out is None else Path(clips_out)
    result = check_table(
        Path(table), loaded.config, command.name, ranks=ranks, epoch=epoch, files=not no_files, clips=out
    )
    for note in result.table.notes:
        output.note(note)
    if result.missing and result.error is None:
        output.note(str(result.table.missing_files_error(result.missing)))
    lines = [*result.report.lines(), *result.examples(SHOWN)]
    output.result({**result.to_json(), "clips_out": clips_out} if json_mode else {}, lines)
    if result.error is None:
        return 0
    if not json_mode:
        raise result.error
    # One JSON object goes to stdout, and it holds the error already.
    output.note(f"error: {result.error}")
    return result.error.exit_code


@app.command(
    "cache",
    epilog=examples(
        "osora data cache stage1 --dataset.data-path clips.csv",
        "osora data cache my.yaml --cache-windows 4",
        "torchrun --nproc-per-node 8 -m osora_cli data cache my.yaml",
        fields_of="train-diffusion",
    ),
)
@guarded
def cache(
    ctx: typer.Context,
    config: ConfigArgument = None,
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="Tensors in a file of the cache, MiB.")] = 256,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make latents and text embeddings of a table once, for --cached-video and --cached-text.

    CONFIG is that of the diffusion training. What is there already is kept, so it
    may be ended at any time and started again. Under torchrun the processes share
    the work.
    """
    from osora_cli.app.cache.plan import Ranks
    from osora_cli.app.cache.run import make_cache

    ranks = Ranks.of_environment()
    output = Output(json_mode, quiet or ranks.rank > 0, debug)

    loaded = _diffusion_config(ctx, config, output)
    clips, captions = Progress(output, "data cache", "clips"), Progress(output, "data cache", "captions")
    try:
        result = make_cache(loaded, clips=clips, captions=captions, ranks=ranks, shard_bytes=shard_mib << 20)
    finally:
        clips.close()
        captions.close()
    payload = result.to_json()
    for note in result.notes:
        output.note(note)
    for shard, reason in list(result.damaged.items())[:SHOWN]:
        output.note(f"removed {shard}, which could not be read, and made it again: {reason}")
    for path, reason in list(result.unreadable.items())[:SHOWN]:
        output.note(f"left out: {path}: {reason}")
    if ranks.rank == 0:
        output.result(payload, cache_lines(payload))


@app.command(
    "latent-stats",
    epilog=examples(
        "osora data latent-stats my.yaml --number 256",
        "osora data latent-stats my.yaml --write scaled.yaml",
        fields_of="train-diffusion",
    ),
)
@guarded
def latent_stats(
    ctx: typer.Context,
    config: ConfigArgument = None,
    number: Annotated[int, typer.Option("--number", min=1, help="Clips of the table to measure.")] = 256,
    write: Annotated[
        str | None, typer.Option("--write", metavar="YAML", help="A config to write: CONFIG with the factor found.")
    ] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure mean and deviation of an autoencoder's latents, and the factor that brings them to 1.

    CONFIG is that of the diffusion training; its `ae` names the autoencoder.
    """
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.cache.latent_stats import latent_stats as measure

    loaded = _diffusion_config(ctx, config, output)
    progress = Progress(output, "data latent-stats", "clips")
    try:
        result = measure(loaded, number=number, write=None if write is None else Path(write), progress=progress)
    finally:
        progress.close()
    payload = result.to_json()
    for note in result.notes:
        output.note(note)
    for path, reason in result.unreadable[:SHOWN]:
        output.note(f"left out: {path}: {reason}")
    output.result(payload, latent_lines(payload))


def _diffusion_config(ctx: typer.Context, config: str | None, output: Output) -> TrainDiffusionConfig:
    """The config of the diffusion training that a table is prepared for."""
    from osora_cli.config.diffusion import TrainDiffusionConfig

    return load_for(ctx, "train diffusion", TrainDiffusionConfig, config, output).config
