"""The loader against decoding a whole clip and cropping it then: clips per second, resize included, in one run.

    python tests/benchmarks/data_loader.py [--clips 24] [--seconds 10] [--gop 25] [--frames 33] [--side 256]

The clips are 1280x720 at 25 frames a second, made from a real one, with a key frame every `--gop` frames; each gives
`--frames` frames that follow one another. Both ways use one process and one decoding thread and must give the same
pixels, which is asserted. A first pass meets each file for the first time, a second one knows its frames already.
Prints clips per second and ratios, which are what counts: the seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import torch
from data_clips import encode_clip, real_clips
from torch import Tensor

from osora_cli.app.data.meta import make_meta
from osora_cli.data.crop import draw_frame_indices
from osora_cli.data.draws import draw_rng
from osora_cli.data.loader import ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import resize_crop_uint8


def decode_all_then_crop(path: Path, indices: Sequence[int], size: tuple[int, int]) -> Tensor:
    """uint8 [3, T, H, W], as a loader does that has no index: every frame in memory, then the window, then its size."""
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        video = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    frames = torch.from_numpy(video[list(indices)]).permute(0, 3, 1, 2)
    return resize_crop_uint8(frames, size).transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--gop", type=int, default=25)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--side", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = next(path for path in real_clips() if path.stem == "bigbuckbunny")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "clips"
        folder.mkdir()
        encode_clip(source, folder / "0000.mp4", args.seconds, size=(1280, 720), gop=args.gop)
        for number in range(1, args.clips):
            shutil.copyfile(folder / "0000.mp4", folder / f"{number:04d}.mp4")
        make_meta(folder, Path(name) / "clips.csv")
        compare(ClipTable.load(Path(name) / "clips.csv"), args)


def compare(table: ClipTable, args: argparse.Namespace) -> None:
    size = (args.side, args.side)
    batches = [Batch((row,), args.frames, *size, (row,), np.array([row])) for row in range(len(table))]
    loader = ClipLoader(table, seed=0, fps_max=None)
    taken, pixels = [], []
    for _ in ("first", "second"):
        began = time.perf_counter()
        pixels = [batch.video[0] for batch in loader.read(batches, 0)]
        taken.append(time.perf_counter() - began)
    loader.close()
    began = time.perf_counter()
    for row, mine in enumerate(pixels):
        indices = draw_frame_indices(int(table.num_frames[row]), args.frames, 1, draw_rng(0, 0, row, "clip"))
        theirs = decode_all_then_crop(table.resolve(row), indices.tolist(), size)
        assert int((theirs.int() - mine.int()).abs().max()) <= 2, "not the same pixels"
    whole = time.perf_counter() - began
    count = len(table)
    print(f"{count} clips 1280x720, {int(table.num_frames[0])} frames, a key frame every {args.gop}; "
          f"{args.frames} frames of each at {args.side}x{args.side}; the same pixels")  # fmt: skip
    for label, seconds in (
        ("loader, first pass", taken[0]),
        ("loader, second pass", taken[1]),
        ("all, then crop", whole),
    ):
        print(f"  {label:<20} {count / seconds:7.2f} clips/s")
    print(f"  the loader is {whole / taken[0]:.2f} times as fast at first, then {whole / taken[1]:.2f} times")


if __name__ == "__main__":
    main()
