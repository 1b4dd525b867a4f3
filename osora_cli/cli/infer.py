"""`osora infer ...`: what trained models make."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Annotated

import typer

from osora_cli.cli.configured import is_rank, launch_here, load_for, print_plain_config
from osora_cli.cli.options import ConfigArgument, Debug, Json, PrintConfig, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.progress import Progress
from osora_cli.cli.results import reconstruct_lines

app = new_app("Use a trained model.")


@app.command(
    "reconstruct",
    epilog=examples(
        "osora infer reconstruct --save-dir recon --from-pretrained outputs/RUN",
        "osora infer reconstruct my.yaml --dataset.data-path clips.csv",
        fields_of="infer-reconstruct",
    ),
)
@guarded
def reconstruct(
    ctx: typer.Context,
    config: ConfigArgument = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", metavar="N", min=1, show_default=False, help="Share the clips among N processes, one a GPU."
        ),
    ] = None,
    show_config: PrintConfig = False,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Originals and reconstructions, with PSNR, SSIM and LPIPS of each clip.

    Writes orig/, recn/, side_by_side/, side_by_side.png and metrics.json into
    --save-dir. LPIPS needs weights: osora weights fetch lpips-vgg.

    --from-pretrained, short for --model.from-pretrained, names the weights: a run,
    a checkpoint or a file.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several processes, the one that speaks
    output = Output(json_mode, quiet or not first, debug)
    from osora_cli.config.schema import ReconstructConfig

    loaded = load_for(ctx, "infer reconstruct", ReconstructConfig, config, output)
    if show_config:
        print_plain_config(loaded.config, "infer reconstruct", loaded.path, output)
        return 0
    if nproc is not None and not is_rank():
        return launch_here(nproc)
    from osora_cli.app.reconstruct.run import reconstruct as reconstruct_clips

    progress = Progress(output, "reconstruct", "clips")

    def tell(done: int, total: int, clip: str, share: float) -> None:
        progress(done, total, detail="" if share >= 1 else f"{100 * share:.0f} % of {PurePath(clip).name}")

    try:
        result = reconstruct_clips(loaded.config, progress=tell, notify=output.note)
    finally:
        progress.close()
    if not first:
        return 0
    payload = result.to_json()
    for note in payload.get("notes") or ():
        output.note(note)
    output.result(payload, reconstruct_lines(payload))
    return 0
