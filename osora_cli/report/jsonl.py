"""metrics.jsonl: one JSON object per logged update, evaluation or save, and files of JSON that hold any float.

An evaluation's object has `"kind": "eval"`, the update as `step`, and its scores as `eval/NAME`; a save's has
`"kind": "save"`, the checkpoint's update as `step`, and `save/bytes`, `save/seconds`, `save/stall`, `save/gb_per_s`, or
`save/error`; a logged update's has no `kind`. Fields: docs/metrics.md.

Floats are written in the shortest form that reads back to the same bits. JSON has no infinities and no NaN: they
are written as the strings "inf", "-inf" and "nan", which `float()` reads back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from osora_cli.report.base import Record, RunStart, SaveEvent, SilentObserver

FILE_NAME = "metrics.jsonl"
EVAL_KIND = "eval"
SAVE_KIND = "save"

_Key = tuple[str | None, int]


def plain(value: Any) -> Any:
    """The value with everything that JSON knows: non-finite floats and paths as strings, tuples as lists."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    raise TypeError(f"`{value!r}` of type {type(value).__name__} has no place in a JSON record")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old contents or the new, never a part."""
    _replace(path, (json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _key(line: bytes) -> _Key | None:
    """Kind and step of a whole line, or None for one that a killed process cut."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return (record.get("kind"), step) if isinstance(step, int) else None


def cut_back(run_dir: Path, step: int) -> int:
    """Drop every record of metrics.jsonl beyond `step`, and lines that a killed process left incomplete.

    The file is replaced in one rename, and left alone where nothing has to go. Of records of one kind and step only
    the last stays.

    Returns:
        How many lines were dropped.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return 0
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    kept: dict[_Key, bytes] = {}
    for line in lines:
        found = _key(line) if line.endswith(b"\n") else None
        if found is not None and found[1] <= step:
            kept.pop(found, None)
            kept[found] = line
    rest = b"".join(kept.values())
    if rest != data:
        _replace(path, rest)
    return len(lines) - len(kept)


class MetricsFile(SilentObserver):
    """Appends each logged update to RUN/metrics.jsonl, a write a line: a kill leaves at most a cut last line."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def on_start(self, info: RunStart) -> None:
        cut_back(info.folder, info.start_update)
        # Unbuffered: a line is in the kernel's hands when on_log returns.
        self._file = (info.folder / FILE_NAME).open("ab", buffering=0)

    def on_log(self, record: Record) -> None:
        self._append(record)

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._append({"step": update, "kind": EVAL_KIND, **{f"eval/{name}": value for name, value in scores.items()}})

    def on_save(self, event: SaveEvent) -> None:
        if self._file is None or event.counters is None or event.kind not in ("committed", "failed"):
            return
        record: dict[str, Any] = {"step": event.counters.actual_update_step, "kind": SAVE_KIND}
        if event.kind == "failed":
            self._append({**record, "save/error": event.error})
            return
        speed = event.bytes / 1e9 / event.seconds if event.seconds else None
        numbers = {"bytes": event.bytes, "seconds": event.seconds, "stall": event.stall_seconds, "gb_per_s": speed}
        self._append({**record, **{f"save/{name}": value for name, value in numbers.items()}})

    def _append(self, record: Record) -> None:
        if self._file is None:
            raise RuntimeError("a record came before the run's start, or after its end")
        line = (json.dumps(plain(record), separators=(", ", ": "), allow_nan=False) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
