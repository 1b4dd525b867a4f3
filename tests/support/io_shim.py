"""The preloaded shim: compiled on the spot, and what a process that carries it can ask of it."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("io_shim.c")


def build_shim(folder: Path) -> Path:
    """The shared library; the test is skipped, loudly, where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT TESTED: there is no C compiler, so no EIO, no short writes and no power cuts")
    library = folder / "io_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"NOT TESTED: the shim for EIO, short writes and power cuts does not compile: {made.stderr[:300]}")
    return library


def arm(run: str, *, fault: dict[str, Any] | None, trace: str | None) -> None:
    """Called in the process that carries the shim."""
    shim = ctypes.CDLL(None)
    if trace is not None:
        shim.shim_trace(run.encode(), trace.encode())
    if fault is not None:
        shim.shim_fault(
            run.encode(),
            str(fault["call"]).encode(),
            int(fault.get("errno", 0)),
            int(fault.get("nth", 1)),
            int(fault.get("count", 1 << 30)),
            str(fault.get("part", "")).encode(),
        )


@dataclass(frozen=True)
class Operation:
    """One recorded operation. `kind`: create, write, truncate (or allocate), sync, rename, exchange, mkdir, unlink."""

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


_KINDS = {
    "c": "create", "w": "write", "t": "truncate", "s": "sync",
    "r": "rename", "x": "exchange", "m": "mkdir", "u": "unlink",
}  # fmt: skip
_HEAD = struct.Struct("=cIIQQQ")


def read_trace(path: Path) -> Iterator[Operation]:
    """The operations in their order."""
    raw = path.read_bytes()
    position = 0
    while position < len(raw):
        op, size, other_size, offset, _, payload = _HEAD.unpack_from(raw, position)
        position += _HEAD.size
        name = raw[position : position + size].decode()
        position += size
        other = raw[position : position + other_size].decode()
        position += other_size
        yield Operation(_KINDS[op.decode()], name, other, offset, raw[position : position + payload])
        position += payload
