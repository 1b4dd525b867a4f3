"""Memory of the loader and its workers over many clips.

    python tests/benchmarks/data_memory.py [--clips 10000] [--workers 0 2]

A table of several hundred different small files, stills among them, read for as many passes as it takes. Prints the
resident memory of the process and of its workers after a tenth of the clips and after all of them, and the
difference, which has to be below 50 MB. Linux only: memory is read from /proc.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

import torch
from data_clips import encode_clip, real_clips
from PIL import Image

from osora_cli.app.data.meta import make_meta
from osora_cli.data.loader import ClipLoader
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable

MB = 1e6
LIMIT_MB = 50.0
CONFIG = {"64px": {1: (1.0, 4), 8: (1.0, 4)}}


def resident(loader: ClipLoader) -> float:
    """MB of this process and the loader's workers, memory that they share counted in parts."""
    pids = ["self", *(str(process.pid) for process in multiprocessing.active_children())]
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total / MB


def make_table(folder: Path) -> ClipTable:
    clips = folder / "clips"
    clips.mkdir()
    for kind, source in enumerate(real_clips()):
        encode_clip(source, clips / f"{kind}.mp4", 1.0, size=(96, 64), gop=12)
        for number in range(100):
            shutil.copyfile(clips / f"{kind}.mp4", clips / f"{kind}_{number}.mp4")
    for number in range(50):
        Image.new("RGB", (120, 90), (number, 80, 160)).save(clips / f"still{number}.jpg")
    make_meta(clips, folder / "clips.csv")
    return ClipTable.load(folder / "clips.csv")


def measure(table: ClipTable, clips: int, workers: int) -> float:
    sampler = BucketSampler(
        table.num_frames, table.height, table.width, table.fps, bucket_config=CONFIG, spatial_compression=16, fps_max=16
    )
    loader = ClipLoader(table, seed=0, fps_max=16, num_workers=workers)
    done, epoch, early = 0, 0, 0.0
    began = time.perf_counter()
    while done < clips:
        for batch in loader.read(sampler.epoch_batches(epoch), epoch):
            before, done = done, done + len(batch.rows)
            if before < clips // 10 <= done:
                early = resident(loader)
            if done >= clips:
                break
        epoch += 1
    late = resident(loader)
    spent = time.perf_counter() - began
    loader.close()
    print(f"{workers} workers: {early:.1f} MB after {clips // 10} clips, {late:.1f} MB after {done}; "
          f"{late - early:+.1f} MB, {done / spent:.0f} clips/s", flush=True)  # fmt: skip
    return late - early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(Path(folder))
        grown = [measure(table, args.clips, workers) for workers in args.workers]
    assert max(grown) < LIMIT_MB, f"memory grew by {max(grown):.1f} MB"


if __name__ == "__main__":
    main()
