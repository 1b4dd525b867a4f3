"""The writer over TensorNVMe's AsyncFileWriter: the only file that imports tensornvme.

What its C++ does, and what follows for us (its source at the commit in `SOURCE`):
- it drops errors, and one pwrite writes at most 2,147,479,552 bytes: each range is read back and its digest compared
  with that of the buffer before the range counts as written;
- `synchronize()` waits with Python's lock held, which would stop the training: the wait is done by watching its log,
  where a line stands once all writes of a writer have ended, and `synchronize()` comes when there is none left;
- log and debug flag are read from the environment when a writer is made, and the line is written only where the
  number of writes was given: one writer a range, with its number of parts.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from errno import EIO
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from osora_cli.checkpoint.layout import ASYNC_LOG_LINE
from osora_cli.checkpoint.manifest import DigestRange
from osora_cli.checkpoint.parallel import default_threads
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.errors import SetupError

SOURCE = "https://github.com/hpcaitech/TensorNVMe (tried: commit 6403388)"
MODULE = "tensornvme.async_file_io"
MAX_WRITE = 2_147_479_552  # bytes that Linux takes in one write
BATCH = 8  # ranges under way at once; each has a thread of TensorNVMe's
BLOCK = 4 << 20
_POLL_S = 0.002
_QUIET_S = 30.0  # without a new line in the log for so long, synchronize() does the waiting


def load_writer_class() -> Callable[..., Any]:
    """TensorNVMe's AsyncFileWriter.

    Raises:
        SetupError: it cannot be had here; says why, where to get it and what it needs.
    """
    try:
        import_module("tensornvme")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "tensornvme"
        raise _refused("is not installed" if absent else f"cannot be imported: {error}") from None
    except Exception as error:  # an extension built for another torch raises what it likes
        raise _refused(f"cannot be imported: {error}") from None
    try:
        found: Callable[..., Any] = import_module(MODULE).AsyncFileWriter
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise _refused(f"cannot be imported: {error}") from None
        raise _refused(f"has no `{MODULE}`, like release 0.1.0 at PyPI") from None
    except Exception as error:
        raise _refused(f"cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise _refused("needs CUDA, and torch finds none here")
    return found


def _refused(what: str) -> SetupError:
    return SetupError(
        f"async_io_backend `tensornvme`: TensorNVMe {what}",
        allowed="auto, threads (which need nothing)",
        hint=f"build it from {SOURCE}, as its README says: it takes cmake, a CUDA torch and the CUDA headers;\n"
        "       or `--async-io-backend threads`",
    )


@dataclass
class _Task:
    file: TargetFile
    offset: int
    buffer: memoryview
    future: Future[DigestRange]


class TensorNvmeWriter:
    """Writes through TensorNVMe. A thread hands ranges over in batches, others read them back.

    Args:
        make: the class AsyncFileWriter.
        max_write: longest part that is handed over in one call.

    Raises:
        SetupError: see `load_writer_class`.
    """

    name = "tensornvme"

    def __init__(self, make: Callable[..., Any] | None = None, *, max_write: int = MAX_WRITE) -> None:
        self._make = make or load_writer_class()
        self._max_write = max_write
        self._log: Path | None = None
        # It makes a stream with each writer: on this rank's GPU, which a new thread does not know of.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._under_way = 0
        self._sender = threading.Thread(target=self._send, name="osora-nvme", daemon=True)
        self._readers = [
            threading.Thread(target=self._read, name=f"osora-nvme-check-{n}", daemon=True)
            for n in range(default_threads())
        ]
        for thread in (self._sender, *self._readers):
            thread.start()

    def begin(self, log: Path) -> None:
        """See `Writer.begin`. TensorNVMe appends its lines to `log`."""
        self._log = log
        os.environ["TENSORNVME_DEBUG"] = "1"
        os.environ["TENSORNVME_DEBUG_LOG"] = str(log)

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        """See `Writer.submit`."""
        task = _Task(file, offset, buffer, Future())
        with self._idle:
            self._under_way += 1
        self._tasks.put(task)
        return task.future

    def drain(self) -> None:
        """See `Writer.drain`."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """See `Writer.close`."""
        self.drain()
        if self._readers:
            self._tasks.put(None)
            self._sender.join()
            for _ in self._readers:
                self._written.put(None)
            for reader in self._readers:
                reader.join()
            self._readers = []

    def _end(self, task: _Task, result: DigestRange | BaseException) -> None:
        if isinstance(result, BaseException):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)
        with self._idle:
            self._under_way -= 1
            self._idle.notify_all()

    def _send(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        ending = False
        while not ending and (first := self._tasks.get()) is not None:
            batch = [first]
            while len(batch) < BATCH and not ending:
                try:
                    following = self._tasks.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    ending = True
                else:
                    batch.append(following)
            self._write(batch)
            del first, batch  # a reference here would keep buffers alive while idle

    def _write(self, batch: list[_Task]) -> None:
        """Write a batch; it goes on to the readers, or ends with the error of a writer that could not be made."""
        seen = self._lines()
        writers: list[tuple[_Task, Any]] = []
        for task in batch:
            try:
                writers.append((task, self._start(task)))
            except Exception as error:
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = str(task.file.path)
                self._end(task, error)
        self._watch(seen + len(writers))
        for task, writer in writers:
            try:
                writer.synchronize()
            except Exception as error:
                self._end(task, error)
            else:
                self._written.put(task)
        writers.clear()  # with the last reference each closes its file

    def _start(self, task: _Task) -> Any:
        os.close(os.open(task.file.path, os.O_WRONLY | os.O_CLOEXEC))  # where it fails, it makes noise as it is let go
        parts = list(self._parts(len(task.buffer)))
        writer = self._make(str(task.file.path), n_entries=1, backend="pthread", n_tasks=len(parts))
        array = np.frombuffer(task.buffer, dtype=np.uint8)
        for begin, length in parts:
            writer.write_raw(array, array.ctypes.data + begin, length, task.offset + begin)
        return writer

    def _parts(self, length: int) -> Iterator[tuple[int, int]]:
        for begin in range(0, length, self._max_write):
            yield begin, min(self._max_write, length - begin)

    def _lines(self) -> int:
        with suppress(OSError):
            if self._log is not None:
                return self._log.read_bytes().count(ASYNC_LOG_LINE.encode())
        return 0

    def _watch(self, wanted: int) -> None:
        """Return when the log has so many lines. Not to be relied on: a full disk or another backend leaves none."""
        if self._log is None or os.environ.get("TENSORNVME_BACKEND", "pthread") not in ("", "pthread"):
            return
        seen, since = -1, time.monotonic()
        while (now := self._lines()) < wanted:
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _QUIET_S:
                return
            time.sleep(_POLL_S)

    def _read(self) -> None:
        while (task := self._written.get()) is not None:
            try:
                self._end(task, proven(task.file.path, task.offset, task.buffer))
            except BaseException as error:
                self._end(task, error)
            finally:
                del task


def proven(path: Path, offset: int, buffer: memoryview) -> DigestRange:
    """The digest of a range, read back from the file and equal to the buffer's.

    Raises:
        OSError: the file holds something else there, or cannot be read.
    """
    wanted, got = xxhash.xxh3_128(), xxhash.xxh3_128()
    block = memoryview(bytearray(min(BLOCK, len(buffer))))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position = 0
        while position < len(buffer):
            count = os.preadv(fd, [block[: len(buffer) - position]], offset + position)
            if count <= 0:
                break
            wanted.update(buffer[position : position + count])
            got.update(block[:count])
            position += count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    digest = wanted.hexdigest()
    if position != len(buffer) or got.hexdigest() != digest:
        what = f"bytes {offset} to {offset + len(buffer)} are not what was written (TensorNVMe keeps its errors silent)"
        raise OSError(EIO, what, str(path))
    return DigestRange(offset, len(buffer), digest)
