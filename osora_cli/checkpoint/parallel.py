"""Run a function over items in threads of one's own, also while the interpreter shuts down."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """Threads for reading and writing: they wait for the disk and digest with the GIL released."""
    return max(2, min(8, os.cpu_count() or 1))


def map_threads(function: Callable[[T], R], items: Sequence[T], threads: int | None = None) -> list[R]:
    """`[function(x) for x in items]`, in up to `threads` threads.

    (`concurrent.futures` refuses work once the main thread has ended; a save in flight must still finish then.)

    Raises:
        The first exception of the function, after all threads have ended.
    """
    count = min(threads or default_threads(), len(items))
    if count <= 1:
        return [function(item) for item in items]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for position in range(len(items)):
        todo.put(position)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                position = todo.get_nowait()
            except queue.Empty:
                return
            try:
                results[position] = function(items[position])
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=work, name=f"osora-map-{n}", daemon=True) for n in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[position] for position in range(len(items))]
