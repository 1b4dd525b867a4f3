"""The header of a safetensors file: built, parsed and checked. Knows no torch and reads no tensor.

Layout: 8 bytes little-endian header length, the JSON header padded with spaces to a multiple of 8, the data.
A JSON entry holds dtype, shape and the byte range counted from the start of the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

ITEMSIZE = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the limit of the safetensors library


class HeaderError(ValueError):
    """The file has no readable header; the message says in which way."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `begin` and `end` are byte offsets in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """Entries in the order of their bytes. `data_start` is the header's own size with the 8 bytes of its length."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 8

    @property
    def end(self) -> int:
        """The size that the file must have."""
        return max((entry.end for entry in self.entries), default=self.data_start)

    def covering(self, begin: int, end: int) -> list[Entry]:
        """Entries with a byte in [begin, end)."""
        return [e for e in self.entries if e.begin < end and begin < e.end]


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, Header]:
    """The header's bytes for tensors (key, dtype, shape) that follow each other without a gap."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, dtype, shape in tensors:
        begin, position = position, position + ITEMSIZE[dtype] * prod(shape)
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, position]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    return raw, parse_header(raw)


def parse_header(raw: bytes) -> Header:
    """Parse the first bytes of a file, which hold the whole header.

    Raises:
        HeaderError: no header of this format.
    """
    length = int.from_bytes(raw[:8], "little")
    try:
        table = json.loads(raw[8 : 8 + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the header is no JSON ({error})") from None
    if not isinstance(table, dict):
        raise HeaderError("the header is no JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("`__metadata__` is no table of strings")
    start = 8 + length
    entries = sorted((_entry(key, value, start) for key, value in table.items()), key=lambda e: (e.begin, e.end))
    return Header(tuple(entries), metadata, start)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _entry(key: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"tensor `{key}` has no dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise HeaderError(f"tensor `{key}` has the unknown dtype `{dtype}`")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"tensor `{key}` has a shape or offsets that are no counts")
    return Entry(key, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        HeaderError: empty, something else than a safetensors file (says what), or a broken header.
        OSError: not readable.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        first = os.pread(fd, 512, 0)
        _refuse_other_things(first, size)
        length = int.from_bytes(first[:8], "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            what = "the file begins with zeros" if first[:8] == bytes(8) else "the header's length is out of bounds"
            raise HeaderError(f"{what} (length {length}, file {size} bytes): damaged, or no safetensors file")
        return parse_header(os.pread(fd, 8 + length, 0))
    finally:
        os.close(fd)


def _refuse_other_things(first: bytes, size: int) -> None:
    """Things that downloads leave in place of a shard."""
    if size == 0:
        raise HeaderError("the file is empty (0 bytes)")
    if first.startswith(b"version https://git-lfs"):
        raise HeaderError("a Git LFS pointer stands in place of the file: `git lfs pull` fetches it")
    if first.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise HeaderError("a web page (HTML) stands in place of the file: the download went wrong")


def layout_faults(header: Header, size: int) -> list[tuple[str | None, str]]:
    """What is wrong with the offsets: (tensor or None, what). Empty: they cover the file exactly once."""
    faults: list[tuple[str | None, str]] = []
    position = header.data_start
    for entry in header.entries:
        wanted = ITEMSIZE[entry.dtype] * prod(entry.shape)
        if entry.nbytes != wanted:
            shape = f"{entry.dtype}{list(entry.shape)}"
            faults.append((entry.key, f"has {entry.nbytes} bytes where {shape} takes {wanted}"))
        if entry.begin != position:
            what = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            faults.append((entry.key, f"{what}: begins at byte {entry.begin}, not {position}"))
        if entry.end > size:
            faults.append((entry.key, f"is cut: ends at byte {entry.end}, the file at {size}"))
        position = max(position, entry.end)
    if size > position:
        faults.append((None, f"has {size - position} bytes behind its last tensor"))
    return faults
