"""pandarallel in a thread that can be given up: its pool waits for ever for the result of a worker that was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.managers import SyncManager
from typing import Any

_WAIT_S = 2.0
_WATCH_S = 0.5


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent is gone, however that came about."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()


class _Recorder:
    """Stands in for pandarallel's multiprocessing context, to keep hold of what it makes and never hands out, and to
    have its processes end when this one is killed.

    The two methods are multiprocessing's, names included.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._parent = os.getpid()
        self.manager: Any = None
        self.pool: Any = None

    def Manager(self) -> Any:
        self.manager = SyncManager(ctx=self._context)
        self.manager.start(_end_with, (self._parent,))
        return self.manager

    def Pool(self, processes: int) -> Any:
        self.pool = self._context.Pool(processes, _end_with, (self._parent,))
        return self.pool


class Drive(threading.Thread):
    """Calls a function for each of many values in pandarallel's worker processes; what it returns is not kept.

    Without shared memory, prints and progress bars. Worker processes do not see Ctrl-C: `end` ends them.

    Attributes:
        failure: what pandarallel raised, in words.
    """

    def __init__(self, values: Sequence[str], function: Callable[[str], object], workers: int) -> None:
        super().__init__(name="pandarallel", daemon=True)
        self._values = list(values)
        self._function = function
        self._workers = workers
        self._made = _Recorder(None)
        self._seen: set[int] = set()
        self.failure: str | None = None

    def run(self) -> None:
        try:
            import pandas as pd
            from pandarallel import core

            self._made = _Recorder(multiprocessing.get_context("fork"))
            # Forked processes inherit the mask.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            context, core.CONTEXT = core.CONTEXT, self._made
            try:
                core.pandarallel.initialize(
                    nb_workers=self._workers, progress_bar=False, verbose=0, use_memory_fs=False
                )
                values: Any = pd.Series(self._values, dtype=object)
                values.parallel_apply(self._function)
            finally:
                core.CONTEXT = context
            self._made.pool.join()
            self._made.manager.shutdown()
        except BaseException as error:
            # The text alone: the exception would hold on to the pool.
            self.failure = f"{type(error).__name__}: {error}"

    def lost_a_worker(self) -> bool:
        """Whether a worker that was there is gone. The pool starts another, but not on what the lost one had."""
        processes = list(getattr(self._made.pool, "_pool", ()))
        alive = {process.pid for process in processes if process.pid is not None and process.exitcode is None}
        lost = bool(self._seen - alive)
        self._seen |= alive
        return lost

    def end(self) -> None:
        """Ends what still runs: after a lost worker, an exception or Ctrl-C. Does nothing when all is done.

        `Pool.terminate` is of no use here: it waits for a lock that a killed worker may have had, for ever, and so
        would the pool's own clean-up at the end of the program.
        """
        if not self.is_alive():
            return
        pool = self._made.pool
        if pool is not None:
            with suppress(AttributeError, ValueError, OSError):
                pool._terminate.cancel()
                for handler in (pool._worker_handler, pool._task_handler, pool._result_handler):
                    handler._state = "TERMINATE"
                pool._change_notifier.put(None)  # wakes the thread that would replace the workers
                pool._worker_handler.join(_WAIT_S)
            for process in list(getattr(pool, "_pool", ())):
                process.kill()
                process.join(_WAIT_S)
        if self._made.manager is not None:
            with suppress(OSError):
                self._made.manager.shutdown()  # the thread waits for its queue
        self.join(_WAIT_S)
