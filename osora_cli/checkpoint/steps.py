"""An optimizer's own step, read from the bytes of its files. Knows no torch."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any, NoReturn

from osora_cli.checkpoint.headers import Entry, Header
from osora_cli.checkpoint.layout import parse_state_key

_FORMATS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
_MAX_PICKLE = 1 << 16


class NotPlain(ValueError):
    """Pickled bytes hold more than plain values (they would run code), or are broken."""


class _PlainUnpickler(pickle.Unpickler):
    """Admits ints, floats, bools, strings, lists, tuples and dicts: nothing that has to be looked up by name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotPlain(f"names `{module}.{name}`, which is no plain value")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotPlain("refers to an object outside of itself")


def plain_value(data: bytes) -> Any:
    """The value in pickled bytes, as HybridAdam's int `step` is stored by Open-Sora's asynchronous mode.

    Raises:
        NotPlain: the bytes name a class or function, are longer than 64 KiB, or are broken.
    """
    if len(data) > _MAX_PICKLE:
        raise NotPlain(f"has {len(data)} bytes, far more than a number takes")
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # pickle raises what it likes on broken input
        raise NotPlain(f"is broken ({type(error).__name__}: {error})") from None


def decode_step(data: bytes, dtype: str) -> float:
    """One optimizer step from its bytes.

    Raises:
        ValueError: not one number, or a number that counts nothing.
    """
    if dtype == "U8":
        value = plain_value(data)
    elif dtype in _FORMATS and len(data) == struct.calcsize(_FORMATS[dtype]):
        value = struct.unpack(_FORMATS[dtype], data)[0]
    else:
        raise ValueError(f"has dtype {dtype} and {len(data)} bytes, no single number")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"is `{value!r}`, no number of steps")
    return float(value)


def step_entries(header: Header) -> list[Entry]:
    """The entries of an optimizer's file that are steps."""
    found = []
    for entry in header.entries:
        state = parse_state_key(entry.key)
        if state is not None and state[1] == "step":
            found.append(entry)
    return found


def read_steps(path: Path, header: Header) -> list[tuple[str, float]]:
    """(key, step) of each parameter in one file.

    Raises:
        ValueError: one of them is no number of steps; the message names its key.
        OSError: the file cannot be read.
    """
    steps = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for entry in step_entries(header):
            data = os.pread(fd, min(entry.nbytes, _MAX_PICKLE + 1), entry.begin)
            try:
                steps.append((entry.key, decode_step(data, entry.dtype)))
            except ValueError as error:
                raise ValueError(f"`{entry.key}` {error}") from None
    finally:
        os.close(fd)
    return steps
