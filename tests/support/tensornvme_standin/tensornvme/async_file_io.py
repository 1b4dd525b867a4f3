"""AsyncFileWriter as TensorNVMe's source (commit 6403388) has it with the `pthread` backend, less the CUDA stream.

What matters of it: the file is opened without O_TRUNC and for writing only; each call is one pwrite in a pool of
`n_entries` threads, whose result nobody looks at; flag and path of the log are read from the environment when the
writer is made; the line comes when as many writes have ended as were announced, and never where none were; callbacks
run in synchronize().

`FAULT` is a function of (fd, bytes, offset) that writes in place of os.pwrite, for tests of what is kept silent.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_RW_COUNT = 0x7FFFF000
FAULT: Callable[[int, bytes, int], int] | None = None
CALLS: list[tuple[str, int, int]] = []  # (path, bytes, offset) of each write_raw
MADE: list[AsyncFileWriter] = []


class AsyncFileWriter:
    def __init__(self, path: str, n_entries: int = 16, backend: str | None = None, n_tasks: int = 0) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode=0o664)
        if backend not in (None, "pthread"):
            raise RuntimeError(f"Unsupported backend: {backend}")
        self.offset = 0
        self.buffers: list[Any] = []
        self._debug = os.environ.get("TENSORNVME_DEBUG", "").lower() in ("1", "true")
        self._log = os.environ.get("TENSORNVME_DEBUG_LOG", "")
        self._total = n_tasks
        self._done = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(n_entries)
        self._futures: list[tuple[Future[None], Callable[[], None]]] = []
        MADE.append(self)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> None:
        CALLS.append((self.path, n_bytes, offset))
        self.buffers.append(py_ref)
        index = len(self.buffers) - 1
        future = self._pool.submit(self._write, buffer, n_bytes, offset)
        self._futures.append((future, lambda: self.buffers.__setitem__(index, None)))
        self.offset += n_bytes

    def _write(self, buffer: int, n_bytes: int, offset: int) -> None:
        data = ctypes.string_at(buffer, min(n_bytes, MAX_RW_COUNT))
        try:
            (FAULT or os.pwrite)(self.fd, data, offset)
        except OSError:
            pass  # the value of pwrite is dropped in the C++
        if self._debug:
            with self._lock:
                self._done += 1
                complete = self._done == self._total
            if complete and self._log:
                with suppress(OSError), Path(self._log).open("a") as log:  # an ofstream says nothing either
                    log.write("All tasks are completed\n")

    def synchronize(self) -> None:
        for future, callback in self._futures:
            future.result()
            callback()
        self._futures.clear()
        self.buffers.clear()

    def __del__(self) -> None:
        self.synchronize()
        self._pool.shutdown()
        os.close(self.fd)
