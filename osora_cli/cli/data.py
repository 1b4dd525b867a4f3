"""`osora data ...`: tables of clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osora_cli.cli.configured import overrides_of
from osora_cli.cli.options import ConfigArgument, Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.progress import Progress
from osora_cli.cli.results import SHOWN, meta_lines
from osora_cli.errors import UsageError

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
    from osora_cli.app.data_meta import make_meta

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
    from osora_cli.app.data_check import check_table, load_training_config

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
