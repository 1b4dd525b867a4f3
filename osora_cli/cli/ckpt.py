"""`osora ckpt ...`: checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.progress import Progress
from osora_cli.cli.results import verify_lines

app = new_app("Look at checkpoints.")


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
    from osora_cli.app.ckpt import verify_path

    progress = Progress(output, "verify", "bytes")
    try:
        result = verify_path(Path(path), quick=quick, deep=deep, strict=strict, progress=progress)
    finally:
        progress.close()
    payload = result.to_json()
    output.result(payload, verify_lines(payload))
    return result.exit_code
