"""What the digests cost a write, and how fast a verification reads.

    python tests/benchmarks/checkpoint_io.py --folder DISK [--gb 10] [--rounds 3]

Goals: digests cost less than 10 % of the time of the write; verify reads at 80 % of the speed of a plain read of the
same bytes by the same number of threads, or better, from the page cache and from the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.parallel import default_threads, map_threads
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.checkpoint.writer import threads as threads_module
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.checkpoint.writer.threads import ThreadWriter
from osora_cli.tensors import TensorShard

PIECE = 64 << 20


def raw_write(path: Path, nbytes: int, threads: int) -> float:
    """Seconds to pwrite so many bytes into a new file and fsync it. Nothing else: no digest, no second file."""
    block = memoryview(bytearray(os.urandom(1 << 20) * (PIECE >> 20)))
    path.unlink(missing_ok=True)
    os.sync()
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    fsio.preallocate(fd, nbytes)
    starts = range(0, nbytes, PIECE)
    map_threads(lambda at: fsio.write_all(fd, block[: min(PIECE, nbytes - at)], at), starts, threads)
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


class _NoDigest:
    """Takes the place of xxh3 to see what it costs."""

    def __init__(self, data: object = None) -> None: ...

    def update(self, data: object) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 32


def staged_write(path: Path, nbytes: int, buffers: list[memoryview], digest: bool) -> float:
    """Seconds that the writer takes for so many bytes, to the end of fdatasync, with and without digests."""

    class _Module:
        xxh3_128: Any = staticmethod(xxhash.xxh3_128 if digest else _NoDigest)

    os.sync()
    threads_module.xxhash = _Module  # type: ignore[assignment]
    writer = ThreadWriter()
    started = time.perf_counter()
    file = TargetFile.create(path.name, path, nbytes)
    for number, at in enumerate(range(0, nbytes, PIECE)):
        writer.submit(file, at, buffers[number % len(buffers)][: min(PIECE, nbytes - at)])
    writer.drain()
    file.sync_and_close()
    seconds = time.perf_counter() - started
    writer.close()
    threads_module.xxhash = xxhash
    path.unlink()
    return seconds


def digest_cost(folder: Path, nbytes: int, rounds: int) -> None:
    buffers = [memoryview(bytearray(os.urandom(1 << 20) * (PIECE >> 20))) for _ in range(default_threads())]
    plain, with_digest = [], []
    staged_write(folder / "file", nbytes, buffers, True)
    for number in range(rounds):  # by turns and in turned order, since disks change their pace
        for digest in (number % 2 == 0, number % 2 == 1):
            (with_digest if digest else plain).append(staged_write(folder / "file", nbytes, buffers, digest))
    print(
        "  seconds, plain/digested  " + ", ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(plain, with_digest, strict=True))
    )
    a, b = statistics.median(plain), statistics.median(with_digest)
    print(f"write + fdatasync   {nbytes / 1e9 / a:6.2f} GB/s without digests, {nbytes / 1e9 / b:6.2f} GB/s with")
    print(f"  digests cost      {b / a - 1:+.1%} of the time (goal: < 10 %); spread {max(plain) / min(plain):.2f}x")
    once = xxhash.xxh3_128()
    started = time.perf_counter()
    for _ in range(4):
        once.update(buffers[0])
    print(f"  xxh3_128 alone    {4 * PIECE / 1e9 / (time.perf_counter() - started):6.2f} GB/s a thread")


def plain_read(files: list[Path], threads: int) -> float:
    """Seconds to read the files' bytes, each thread into one buffer of its own again and again."""
    import threading

    local = threading.local()
    work = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]
    handles = {path: os.open(path, os.O_RDONLY) for path in files}

    def read(item: tuple[Path, int]) -> None:
        if not hasattr(local, "view"):
            local.view = memoryview(bytearray(4 << 20))
        path, at = item
        end = at + PIECE
        while at < end and (got := os.preadv(handles[path], [local.view[: end - at]], at)):
            at += got

    started = time.perf_counter()
    map_threads(read, work, threads)
    seconds = time.perf_counter() - started
    for fd in handles.values():
        os.close(fd)
    return seconds


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def verify_speed(folder: Path, nbytes: int, rounds: int) -> None:
    tensors = [torch.rand(32 << 20) for _ in range(max(1, nbytes // (128 << 20)))]
    shards = [TensorShard.whole(f"w{n}", tensor) for n, tensor in enumerate(tensors)]
    store = CheckpointStore(folder / "run", async_io=False)
    store.save(CheckpointContents(Counters(0, 1, 1, None, 1), {"model": shards}))
    store.close()
    del tensors, shards
    checkpoint = folder / "run/epoch0-global_step1"
    files = sorted(checkpoint.rglob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    threads = default_threads()
    for name, cold in (("page cache", False), ("disk", True)):
        plain, ours = [], []
        for _ in range(rounds):
            for times, run in ((plain, lambda: plain_read(files, threads)), (ours, lambda: _verify(checkpoint))):
                if cold:
                    forget(files)
                elif not plain:
                    plain_read(files, threads)
                times.append(run())
        a, b = statistics.median(plain), statistics.median(ours)
        print(f"verify, {name:<11} {total / 1e9 / b:6.2f} GB/s; plain read {total / 1e9 / a:6.2f} GB/s,"
              f" {threads} threads: {a / b:.0%} of it (goal: >= 80 %)")  # fmt: skip


def _verify(checkpoint: Path) -> float:
    started = time.perf_counter()
    assert verify(checkpoint).verdict == "ok"
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk that is meant (default: the system's temporary folder)")
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="osora-bench-", dir=args.folder))
    try:
        digest_cost(folder, int(args.gb * 1e9), args.rounds)
        verify_speed(folder, int(args.gb * 1e9), args.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
