"""`--nproc N`: this command again in N processes, under torch's elastic launcher, which runs in this one."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from osora_cli.errors import RunError, UsageError

SHUTDOWN_S = 600  # for a save at the end; torch before 2.12 knows 30 s only


def launch(argv: Sequence[str], processes: int) -> int:
    """Run `osora ARGV...` in `processes` processes of this machine; gives the exit code.

    SIGINT, SIGTERM and SIGUSR1 reach all of them. The ranks say themselves what went wrong, but for one that was
    killed.

    Raises:
        UsageError: no number of processes.
        RunError: a process was killed.
    """
    if processes < 1:
        raise UsageError(f"`--nproc` is `{processes}`", where="--nproc", allowed="1 and more")
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # The ranks speak for themselves: of the launcher's own lines only those that tell of its own faults.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        with _forwarded(signal.SIGUSR1):
            elastic_launch(_config(processes), sys.executable)("-m", "osora_cli", *argv)
    except ChildFailedError as failed:
        return _exit_code(failed)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _config(processes: int) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "monitor_interval": 0.1,
    }
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:
        options["shutdown_timeout"] = SHUTDOWN_S
    return LaunchConfig(**options)


def _exit_code(failed: Any) -> int:
    """Of the rank that failed first. One that a signal ended has said nothing."""
    rank, first = failed.get_first_failure()
    if first.exitcode >= 0:
        return int(first.exitcode)
    name = signal.Signals(-first.exitcode).name
    raise RunError(
        f"rank {rank} was ended by {name}",
        hint="SIGKILL often is the kernel's, out of memory (`dmesg`); go on with `osora resume RUN`",
    )


@contextmanager
def _forwarded(number: signal.Signals) -> Iterator[None]:
    """Pass a signal on to the processes that this one has started."""

    def forward(_number: int, _frame: FrameType | None) -> None:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(number, forward)
    try:
        yield
    finally:
        signal.signal(number, before)


def _children() -> list[int]:
    """The ranks: processes that this one has started in sessions of their own."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in found if os.getsid(pid) == pid]
