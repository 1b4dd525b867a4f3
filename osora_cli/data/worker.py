"""What a loader's worker process needs beside its work: to leave signals to the trainer, and to end with it.

A signal to the whole process group (Ctrl-C, a batch system that ends a job) must not take the workers from a trainer
that still has a save to make. A trainer that is killed must not leave workers behind.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from types import TracebackType

# Between a SIGTERM and the worker's end: what the trainer has left to finish its update and save.
_GRACE_S = 30.0
_POLL_S = 0.5


def start_worker(worker_id: int) -> None:
    """DataLoader's `worker_init_fn`: ignores SIGINT, puts SIGTERM off, and watches the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Blocked for all threads and taken by the watching one, because the main thread may be in a decoder for long.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = _report
    threading.Thread(target=_watch, args=(os.getppid(),), name="osora-worker-watch", daemon=True).start()


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Threads that hand memory over report here. That the trainer went away meanwhile is not the worker's fault."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _watch(parent: int) -> None:
    """Ends the process when its trainer has gone, or some time after a SIGTERM.

    The parent is the fork server, which ends with the process that began it. That need not be the trainer (which may
    itself come from a fork server), so the trainer is watched as well, by the pipe that only it holds open.
    """
    trainer = multiprocessing.parent_process()
    deadline = float("inf")
    while os.getppid() == parent and (trainer is None or trainer.is_alive()) and time.monotonic() < deadline:
        if _terminated(_POLL_S):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    # Not sys.exit: queues have threads that would wait for a reader.
    os._exit(1 if deadline == float("inf") else 128 + signal.SIGTERM)


def _terminated(wait_s: float) -> bool:
    """Whether a SIGTERM came within `wait_s` seconds."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigtimedwait({signal.SIGTERM}, wait_s) is not None
    time.sleep(wait_s)
    return signal.SIGTERM in signal.sigpending()


def _in_fork_server() -> bool:
    main = getattr(sys.modules.get("__main__"), "main", None)
    return main is not None and main is multiprocessing.forkserver.main


if _in_fork_server():
    # The server starts workers on demand and ends when the trainer does. Until a worker has set its own handlers it
    # has these, so a Ctrl-C while workers start prints no traceback of theirs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
