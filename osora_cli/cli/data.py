"""`osora data ...`: tables of clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples, new_app
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
    on_error: Annotated[
        str, typer.Option("--on-error", metavar="skip|fail", help="What a clip that cannot be read does.")
    ] = "skip",
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Add num_frames, height, width, aspect_ratio, resolution and fps to a table of clips.

    A clip that cannot be read is left out, counted and named with the reason.
    """
    output = Output(json_mode, quiet, debug)
    if on_error not in ("skip", "fail"):
        raise UsageError(f"`--on-error` is `{on_error}`", where="--on-error", allowed="skip, fail")
    from osora_cli.app.data_meta import make_meta

    progress = Progress(output, "data meta", "clips")
    try:
        result: Any = make_meta(
            Path(source),
            Path(target),
            num_workers=num_workers,
            root=None if root is None else Path(root),
            exact=exact,
            on_error=on_error,
            progress=progress,
        )
    finally:
        progress.close()
    for path, reason in result.bad[:SHOWN]:
        output.note(f"left out: {path}: {reason}")
    if len(result.bad) > SHOWN:
        output.note(f"left out: {len(result.bad) - SHOWN} more")
    report = None if result.bad_report is None else str(result.bad_report)
    payload = {
        "output": str(result.output),
        "rows": result.rows,
        "bad": [{"path": str(path), "reason": reason} for path, reason in result.bad],
        "bad_report": report,
        "seconds": round(result.seconds, 3),
    }
    output.result(payload, meta_lines(result.rows, str(result.output), result.seconds, len(result.bad), report))
