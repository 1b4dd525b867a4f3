"""The writer that works everywhere: threads that call pwrite with the GIL released."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import xxhash

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.manifest import DigestRange
from osora_cli.checkpoint.parallel import default_threads
from osora_cli.checkpoint.writer.base import TargetFile

# A block is digested and then written while it is in the processor's cache.
BLOCK = 2 << 20

_Task = tuple[TargetFile, int, memoryview, "Future[DigestRange]"]


class ThreadWriter:
    """A pool of daemon threads with one queue.

    (Not `concurrent.futures`: its pools refuse work once the main thread has ended, and a save that is in flight
    then must still be finished.)
    """

    name = "threads"

    def __init__(self, threads: int | None = None) -> None:
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._under_way = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"osora-writer-{n}", daemon=True)
            for n in range(threads or default_threads())
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, log: Path) -> None:
        """See `Writer.begin`."""

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        """See `Writer.submit`."""
        future: Future[DigestRange] = Future()
        with self._idle:
            self._under_way += 1
        self._queue.put((file, offset, buffer, future))
        return future

    def drain(self) -> None:
        """See `Writer.drain`."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """See `Writer.close`."""
        self.drain()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            file, offset, buffer, future = task
            try:
                future.set_result(write_range(file.fd, offset, buffer))
            except BaseException as error:
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = str(file.path)
                future.set_exception(error)
            finally:
                del task, buffer, future  # a reference here would keep a buffer or its error alive while idle
                with self._idle:
                    self._under_way -= 1
                    self._idle.notify_all()


def write_range(fd: int, offset: int, buffer: memoryview) -> DigestRange:
    """Write a buffer and digest it in passing.

    Raises:
        OSError: from the write.
    """
    digest = xxhash.xxh3_128()
    for position in range(0, len(buffer), BLOCK):
        block = buffer[position : position + BLOCK]
        digest.update(block)
        fsio.write_all(fd, block, offset + position)
    fsio.start_writeback(fd, offset, len(buffer))
    return DigestRange(offset, len(buffer), digest.hexdigest())
