"""TensorBoard scalars, written with TensorBoard's own record format and messages.

torch's SummaryWriter is not used: it imports TensorFlow wherever that is installed, and it can only mark old events
as outdated. Here events beyond the checkpoint are taken out of the files on resume, for every reader.
"""

from __future__ import annotations

import io
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from osora_cli.report.base import Record, RunStart, SaveEvent, SilentObserver

FOLDER = "tensorboard"
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")


def _records(data: bytes) -> Iterator[bytes]:
    """Records of an event file, with their framing: up to the first that is cut or damaged, where readers stop too."""
    position = 0
    while position + _LENGTH.size + _CRC.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        end = position + _LENGTH.size + _CRC.size + length + _CRC.size
        record = data[position:end]
        if end > len(data) or not _is_sound(record, length):
            return
        yield record
        position = end


def _payload(record: bytes) -> bytes:
    return record[_LENGTH.size + _CRC.size : -_CRC.size]


def _is_sound(record: bytes, length: int) -> bool:
    head, crc = record[: _LENGTH.size], _CRC.unpack_from(record, _LENGTH.size)[0]
    return bool(masked_crc32c(head) == crc and masked_crc32c(_payload(record)) == _CRC.unpack(record[-_CRC.size :])[0])


def _event_files(folder: Path) -> list[Path]:
    """Event files, oldest first: readers take them in the order of their names."""
    return sorted(path for path in folder.glob("events.out.tfevents.*") if _NAME.match(path.name))


def cut_back(run_dir: Path, step: int) -> int:
    """Take every summary beyond `step` out of RUN/tensorboard, and records that a killed process left incomplete.

    Each file is replaced in one rename, and left alone where nothing has to go.

    Returns:
        How many events were dropped.
    """
    dropped = 0
    for path in _event_files(Path(run_dir) / FOLDER):
        data = path.read_bytes()
        kept = []
        for record in _records(data):
            event = Event.FromString(_payload(record))
            if event.HasField("summary") and event.step > step:
                dropped += 1
            else:
                kept.append(record)
        rest = b"".join(kept)
        if rest != data:
            # The leading dot keeps a reader that lists the folder now from taking it for an event file.
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(rest)
            temporary.replace(path)
    return dropped


def _next_name(folder: Path) -> str:
    """A name that sorts after all files of the folder, also when two runs begin within a second or the clock jumps."""
    last = max((int(match[1]) for path in _event_files(folder) if (match := _NAME.match(path.name))), default=0)
    stamp = max(int(time.time()), last + 1)
    return f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"


class TensorBoardScalars(SilentObserver):
    """One scalar for each number of a logged update or evaluation, named as in metrics.jsonl, its pictures, and
    `save/...` for checkpoints."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def on_start(self, info: RunStart) -> None:
        folder = info.folder / FOLDER
        folder.mkdir(exist_ok=True)
        cut_back(info.folder, info.start_update)
        self._file = (folder / _next_name(folder)).open("xb")
        self._writer = RecordWriter(self._file)
        # The version makes readers look at session starts in place of guessing restarts from steps out of order.
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if info.start_update:
            # For a TensorBoard that is running and has read what was just cut.
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=info.start_update + 1, session_log=start))
        self._writer.flush()

    def on_log(self, record: Record) -> None:
        self._scalars(int(record["step"]), record)

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._scalars(update, {f"eval/{name}": value for name, value in scores.items()})
        for name, pixels in pictures.items():
            coded = io.BytesIO()
            Image.fromarray(pixels).save(coded, format="PNG")
            image = Summary.Image(
                height=pixels.shape[0], width=pixels.shape[1], colorspace=3, encoded_image_string=coded.getvalue()
            )
            summary = Summary(value=[Summary.Value(tag=f"eval/{name}", image=image)])
            self._write(Event(wall_time=time.time(), step=update, summary=summary))
        self._writer.flush()

    def on_save(self, event: SaveEvent) -> None:
        if event.kind == "committed" and event.counters is not None:
            values = {"save/bytes": event.bytes, "save/seconds": event.seconds, "save/stall": event.stall_seconds}
            if event.seconds:
                values["save/gb_per_s"] = event.bytes / 1e9 / event.seconds
            self._scalars(event.counters.actual_update_step, values)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {
            name: float(value)
            for name, value in values.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if not numbers:
            return
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _write(self, event: Event) -> None:
        if self._writer is None:
            raise RuntimeError("a record came before the run's start, or after its end")
        self._writer.write(event.SerializeToString())
