"""Disk, shared memory, and the limits of a process."""

from __future__ import annotations

import os
import resource
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from osora_cli.app.doctor.finding import Finding

GIB = 2**30
TEST_BYTES = 256 * 2**20
# Below these a checkpoint of some gigabytes takes minutes, or nothing of a video model fits.
SLOW_DISK = 100 * 10**6
LITTLE_DISK = 20 * GIB
LITTLE_SHARED = GIB
FEW_FILES = 4096


def disk(folder: Path) -> Iterator[Finding]:
    """Write and fsync speed of the folder that runs go to, and the room there."""
    where = existing_folder(folder)
    free = shutil.disk_usage(where).free
    yield Finding(
        "disk space",
        "warn" if free < LITTLE_DISK else "ok",
        f"{free / GIB:.1f} GiB free for `{folder}`",
        "choose another disk with `--outputs DIR`, or keep fewer checkpoints: `--keep-n-latest N`"
        if free < LITTLE_DISK
        else None,
        {"free_bytes": free},
    )
    if free < 2 * TEST_BYTES:
        yield Finding("disk speed", "fail", "too little room to measure it", "free space on that disk")
        return
    try:
        write, sync = write_speed(where)
    except OSError as error:
        yield Finding(
            "disk speed", "fail", f"`{where}`: {error.strerror}", "choose another folder with `--outputs DIR`"
        )
        return
    slow = sync < SLOW_DISK
    yield Finding(
        "disk speed",
        "warn" if slow else "ok",
        f"{write / 1e9:.2f} GB/s written, {sync / 1e9:.2f} GB/s with fsync (256 MiB, `{where}`)",
        "checkpoints will be slow to become durable: `--async-io` keeps the training going meanwhile" if slow else None,
        {"write_bytes_per_s": write, "fsync_bytes_per_s": sync},
    )


def write_speed(folder: Path, size: int = TEST_BYTES) -> tuple[float, float]:
    """(bytes a second until written, bytes a second until durable) of one new file. Raises OSError."""
    block = memoryview(os.urandom(2**20) * 8)
    path = folder / f".osora-doctor-{uuid.uuid4().hex}"
    try:
        begun = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < size:
                written += file.write(block[: size - written])
            buffered = time.perf_counter() - begun
            os.fsync(file.fileno())
            durable = time.perf_counter() - begun
    finally:
        path.unlink(missing_ok=True)
    return size / buffered, size / durable


def shared_memory() -> Iterator[Finding]:
    """Room for the batches that loader workers hand over."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shared memory", "absent", "no /dev/shm: workers hand batches over through pipes, more slowly")
        return
    usage = shutil.disk_usage(folder)
    little = usage.free < LITTLE_SHARED
    yield Finding(
        "shared memory",
        "warn" if little else "ok",
        f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in /dev/shm",
        "in a container: `--shm-size 8g` or `--ipc host`; or `--num-workers 0`" if little else None,
        {"free_bytes": usage.free},
    )


def limits() -> Iterator[Finding]:
    """Open files and memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    yield Finding(
        "open files",
        "warn" if few else "ok",
        f"at most {soft} at once (up to {hard} can be asked for)",
        f"`ulimit -n {min(hard, 65536) if hard > 0 else 65536}` before a training with many workers" if few else None,
        {"soft": soft, "hard": hard},
    )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    room = total if limit is None else min(total, limit)
    yield Finding("memory", "ok", f"{room / GIB:.1f} GiB for this process", None, {"bytes": room})


def _memory_limit() -> int | None:
    """The control group's limit, where there is one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
