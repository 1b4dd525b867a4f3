"""`data meta` against decoding every frame, on the same files in one run; and beside a bare open of each file.

    python tests/benchmarks/data_meta.py [--clips 1000] [--workers 0] [--decode 1000]

Half of the clips are 10 s long and half 60 s, made from the real clips by repeating their packets. Asserts that number
of frames, height, width and rate are those of decoding; prints seconds, files per second, and ratios, which are what
counts: the seconds depend on the machine. Every method works in one process and with one thread, unless `--workers`
says otherwise for `data meta`. `--decode N` decodes N clips of each length and takes the others to cost as much.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
from data_clips import loop_clip, real_clips

from osora_cli.app.data.meta import make_meta
from osora_cli.data.table import ClipTable

Facts = tuple[int, int, int, float]


def make_clips(folder: Path, count: int, seconds: float) -> list[Path]:
    """The real clips in turn."""
    folder.mkdir()
    made = []
    for number, source in zip(range(count), real_clips() * count, strict=False):
        target = folder / f"{number:05d}_{source.stem}.mp4"
        same = folder / f"{number % 4:05d}_{source.stem}.mp4"
        loop_clip(source, target, seconds) if number < 4 else shutil.copyfile(same, target)
        made.append(target)
    return made


def decode(path: Path) -> Facts:
    """Every frame decoded and counted."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        frames = sum(1 for _ in container.decode(stream))
        return frames, stream.height, stream.width, round(float(stream.average_rate or 0), 3)


def bare_open(path: Path) -> None:
    """What PyAV does at least: the container is opened, the header looked at."""
    with av.open(str(path)) as container:
        _ = container.streams.video[0].frames


def ffprobe(path: Path) -> None:
    command = ["ffprobe", "-v", "error", "-select_streams", "v:0", "-show_entries", "stream=nb_frames,width,height"]
    subprocess.run([*command, str(path)], check=True, capture_output=True)


def timed(action: Callable[[Path], object], paths: list[Path]) -> tuple[float, list[object]]:
    began = time.perf_counter()
    found = [action(path) for path in paths]
    return time.perf_counter() - began, found


def compare(folder: Path, count: int, seconds: float, args: argparse.Namespace) -> None:
    paths = make_clips(folder / f"{seconds:g}", count, seconds)
    output = folder / f"{seconds:g}.csv"
    result = make_meta(folder / f"{seconds:g}", output, num_workers=args.workers)
    table = ClipTable.load(output)
    assert result.bad == []
    sample = paths[: args.decode]
    spent, found = timed(decode, sample)
    decoding = spent / len(sample) * count
    columns = (table.num_frames.tolist(), table.height.tolist(), table.width.tolist(), table.fps.tolist())
    facts = list(zip(*columns, strict=True))
    assert facts[: len(sample)] == found, "not the numbers of decoding"
    print(f"{count} clips of {seconds:g} s, {sum(columns[0])} frames; the numbers are those of decoding")
    print(f"  data meta              {result.seconds:9.2f} s  {count / result.seconds:9.1f} files/s")
    others = [("bare PyAV open", bare_open), *([("ffprobe", ffprobe)] if shutil.which("ffprobe") else [])]
    for name, action in others:
        spent, _ = timed(action, paths)
        print(f"  {name:<22} {spent:9.2f} s  {count / spent:9.1f} files/s")
    how = "" if len(sample) == count else f" (from {len(sample)} clips)"
    print(f"  decoding every frame   {decoding:9.2f} s  {count / decoding:9.1f} files/s{how}")
    print(f"  data meta is {decoding / result.seconds:.1f} times as fast as decoding", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--decode", type=int, default=1000, help="clips of each length that are decoded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seconds in (10.0, 60.0):
            compare(Path(folder), args.clips // 2, seconds, args)


if __name__ == "__main__":
    main()
