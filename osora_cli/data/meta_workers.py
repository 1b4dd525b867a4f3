"""Looks at many files: in this process, or in workers that pandarallel drives. Each has a child of its own to probe."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from osora_cli.data.meta_drive import Drive
from osora_cli.data.meta_journal import Journal, JournalWriter, stamp_of
from osora_cli.data.prober import Facts, Prober
from osora_cli.errors import SetupError

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
# How long results may stay out after a worker is gone, before it is held for lost.
_LOST_AFTER_S = 3.0


@dataclass(frozen=True)
class Look:
    """How files are looked at.

    Attributes:
        exact: decode every file.
        time_limit_s: seconds a file may take.
        num_workers: processes; 0 and 1 work in this one.
    """

    exact: bool = False
    time_limit_s: float = 60.0
    num_workers: int = 0


def look_at(files: Sequence[str], look: Look, journal: Journal, progress: Progress | None) -> dict[str, Facts]:
    """The facts of every file, whatever the number of workers. What the journal knows already is not asked again.

    Args:
        files: absolute paths, each once.
        look: how.
        journal: open; findings go there first.
        progress: called in this thread with the number done and the number of all.

    Raises:
        SetupError: processes cannot be started.
    """
    tell = progress or (lambda done, total: None)
    known = journal.forget_faults(journal.read())
    todo = [file for file in files if file not in known]
    before = len(files) - len(todo)
    tell(before, len(files))
    found: dict[str, Facts] = {}
    if look.num_workers > 1 and len(todo) > 1:
        _in_workers(todo, look, journal, lambda done: tell(before + done, len(files)))
        found = journal.read()
    left = [file for file in todo if file not in found]
    if left:
        done = len(files) - len(left)
        found |= _in_process(left, look, journal, lambda more: tell(done + more, len(files)))
    return {file: known[file] if file in known else found[file] for file in files}


def _in_process(files: Sequence[str], look: Look, journal: Journal, tell: Callable[[int], None]) -> dict[str, Facts]:
    found: dict[str, Facts] = {}
    writer = JournalWriter(journal.folder)
    try:
        with Prober(exact=look.exact, time_limit_s=look.time_limit_s) as prober:
            for done, file in enumerate(files, 1):
                found[file] = _looked_at(file, prober, writer)
                tell(done)
    finally:
        writer.close()
    return found


def _in_workers(files: list[str], look: Look, journal: Journal, tell: Callable[[int], None]) -> None:
    """Has pandarallel's workers look at the files. Whatever they leave undone is not in the journal afterwards.

    pandarallel runs in a thread of its own, so that this one can report, be interrupted, and give up on workers: when
    one is killed, pandarallel waits for it for ever.
    """
    workers = min(look.num_workers, len(files))
    # Neighbours in a table are often alike; dealt out in turn, no worker gets all the long ones.
    dealt = [file for start in range(workers) for file in files[start::workers]]
    drive = Drive(dealt, partial(_work, look=look, folder=journal.folder), workers)
    journal.skip_old()
    done = 0
    with warnings.catch_warnings():
        # Forking beside threads, and pandas calls that pandarallel 1.6.5 still makes: neither is for the user.
        warnings.simplefilter("ignore")
        drive.start()
        try:
            steady = time.monotonic()
            while drive.is_alive():
                drive.join(_POLL_S)
                done = journal.count_new()
                tell(min(done, len(files)))
                if not drive.lost_a_worker() and done < len(files):
                    steady = time.monotonic()
                elif time.monotonic() - steady > _LOST_AFTER_S:
                    break
        finally:
            unfinished = drive.is_alive()
            drive.end()
    if unfinished and done < len(files):
        _log.warning("a worker process was killed; its files are looked at one after the other")
    elif drive.failure is not None:
        _log.warning("the workers ended early (%s); the rest is done one after the other", drive.failure)


class _Worker:
    """What a worker process keeps between files."""

    def __init__(self, look: Look, folder: Path) -> None:
        self.pid = os.getpid()
        self.prober = Prober(exact=look.exact, time_limit_s=look.time_limit_s)
        self.writer = JournalWriter(folder)


_worker: _Worker | None = None


def _work(file: str, look: Look, folder: Path) -> bool:
    """Looks at one file, in a worker process. Never raises: pandarallel would tell only at the very end."""
    global _worker
    if _worker is None or _worker.pid != os.getpid():
        _worker = _Worker(look, folder)
    try:
        facts = _looked_at(file, _worker.prober, _worker.writer)
    except SetupError:
        return False  # no fault of the file: it is left to the process that started this one, which can say so
    except Exception as error:
        facts = Facts(reason=f"{type(error).__name__}: {error}")
        _worker.writer.add(file, stamp_of(file), facts)
    return facts.reason is None


def _looked_at(file: str, prober: Prober, writer: JournalWriter) -> Facts:
    """The facts of one file, in the journal. One that is written to meanwhile is looked at once more.

    The journal's stamp is from before the look: facts of a file that changed during it are not taken for good.

    Raises:
        SetupError: the journal cannot be written, or a child process not be started.
    """
    stamp = stamp_of(file)
    facts = prober.probe(file)
    after = stamp_of(file)
    if after != stamp:
        stamp, facts = after, prober.probe(file)
    writer.add(file, stamp, facts)
    return facts
