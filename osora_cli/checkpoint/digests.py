"""Read a checkpoint's bytes against the digests of its manifest, in several threads. Knows no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from osora_cli.checkpoint.findings import Finding
from osora_cli.checkpoint.headers import Header
from osora_cli.checkpoint.manifest import DigestRange, Manifest
from osora_cli.checkpoint.parallel import default_threads, map_threads
from osora_cli.checkpoint.structure import Inspection

BLOCK = 1 << 20  # stays in the core's cache between the read and the digest
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Bad:
    """A range that is not what was written."""

    file: str
    part: DigestRange
    why: str


def _small(file: str, part: DigestRange) -> bool:
    """What the structure level reads too: the small files whole, and the headers, which are ranges of their own."""
    if file.endswith(".safetensors"):
        return part.offset == 0
    return not file.endswith(".pt")


def check_digests(
    i: Inspection, manifest: Manifest, skip: set[str], *, threads: int | None = None, progress: Progress | None = None
) -> Iterator[Finding]:
    """Compare every byte (at the structure level: those of small files and headers) with its digest.

    Args:
        i: the checkpoint; `bytes_read` is counted up.
        manifest: its manifest.
        skip: files that are known to be missing or of the wrong size.
        threads: readers; None: by the number of cores.
        progress: called with (bytes read, bytes to read) from any of the threads, one call at a time.
    """
    work = [
        (file, part)
        for file, record in manifest.files.items()
        if file not in skip
        for part in record.ranges
        if i.level != "structure" or _small(file, part)
    ]
    total = sum(part.length for _, part in work)
    count = min(threads or default_threads(), max(1, len(work)))
    reader = _Reader(i, total, progress)
    # Threads take neighbouring ranges by turns, so the disk sees a few sequential streams.
    bad = [found for found in map_threads(reader.compare, work, count) if found is not None]
    reader.close()
    i.bytes_read += total
    yield from _by_file(i, manifest, bad)


class _Reader:
    """Keeps the files open and one buffer a thread."""

    def __init__(self, i: Inspection, total: int, progress: Progress | None) -> None:
        self._inspection = i
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._files: dict[str, int] = {}

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                fd = os.open(self._inspection.path / file, os.O_RDONLY | os.O_CLOEXEC)
                with suppress(OSError, AttributeError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._files[file] = fd
            return self._files[file]

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def compare(self, item: tuple[str, DigestRange]) -> _Bad | None:
        """None where the bytes are those that were written."""
        file, part = item
        try:
            why = self._differs(self._open(file), part)
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        with self._lock:
            self._done += part.length
            if self._progress is not None:
                self._progress(self._done, self._total)
        return _Bad(file, part, why) if why else None

    def _differs(self, fd: int, part: DigestRange) -> str | None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = bytearray(BLOCK)
        view = memoryview(self._local.buffer)
        digest = xxhash.xxh3_128()
        position, end = part.offset, part.offset + part.length
        while position < end:
            got = os.preadv(fd, [view[: min(BLOCK, end - position)]], position)
            if got <= 0:
                return f"end at byte {position}"
            digest.update(view[:got])
            position += got
        if digest.hexdigest() == part.digest:
            return None
        return "are all zeros" if _all_zeros(fd, part) else "do not match their digest"


def _all_zeros(fd: int, part: DigestRange) -> bool:
    """Whether bytes that are wrong are wrong in this way: what a lost write leaves."""
    for position in range(part.offset, part.offset + part.length, BLOCK):
        block = os.pread(fd, min(BLOCK, part.offset + part.length - position), position)
        if block.count(0) != len(block):
            return False
    return True


def _by_file(i: Inspection, manifest: Manifest, bad: list[_Bad]) -> Iterator[Finding]:
    """One finding a file: which bytes, and which tensors lie in them."""
    for file in sorted({found.file for found in bad}):
        parts = sorted((b for b in bad if b.file == file), key=lambda b: b.part.offset)
        begin, end = parts[0].part.offset, parts[-1].part.offset + parts[-1].part.length
        ranges = len(manifest.files[file].ranges)
        what = f"bytes {begin} to {end} {parts[0].why}"
        if len(parts) > 1:
            what += f" ({len(parts)} of {ranges} ranges)"
        hit = _tensors(i.headers.get(file), parts)
        if len(hit) > 1:
            what += f"; one or more of {len(hit)} tensors, `{hit[0]}` to `{hit[-1]}`"
        yield Finding(file, hit[0] if len(hit) == 1 else None, what)


def _tensors(header: Header | None, parts: list[_Bad]) -> list[str]:
    """Tensors with a byte in one of the ranges, in file order."""
    if header is None:
        return []
    found = [header.covering(b.part.offset, b.part.offset + b.part.length) for b in parts]
    return list(dict.fromkeys(entry.key for entries in found for entry in entries))
