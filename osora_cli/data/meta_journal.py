"""What is already known of the files of a run of `data meta`, on disk, so that an interrupted run goes on.

A folder beside the output, one file a process, one JSON line a file looked at. It is how workers report, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from osora_cli.data.prober import Facts
from osora_cli.errors import SetupError, UsageError

Stamp: TypeAlias = "list[int] | None"

# A process that is forked shares the locks of files that are open: they go only when it is gone, too. It gives them up.
_locks: set[int] = set()


def _give_up_locks() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_give_up_locks)


class JournalWriter:
    """Appends one process's findings. Lines are whole however the process ends."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._path = folder / f"{os.getpid()}.jsonl"
        self._file = os.open(self._path, flags, 0o666)

    def add(self, path: str, stamp: Stamp, facts: Facts) -> None:
        """Keeps what was found of a file that had this stamp before it was looked at."""
        line = json.dumps({"path": path, "stamp": stamp, "facts": astuple(facts)})
        try:
            os.write(self._file, line.encode() + b"\n")
        except OSError as error:
            raise SetupError(f"`{self._path}` cannot be written: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._file)


class Journal:
    """The journal of one output. A context manager: while it is open, no second run writes the same output.

    Left by an exception that is not one of ours (Ctrl-C, a kill), or after `stay`, the folder stays for the next run;
    else it goes.

    Args:
        output: the table that is made.
        exact: findings of a run that decoded are of no use to one that does not, and the other way round.
    """

    def __init__(self, output: Path, *, exact: bool) -> None:
        self.folder = output.with_name(f".{output.name}.progress{'-exact' if exact else ''}")
        self._offsets: dict[Path, int] = {}
        self._count = 0
        self._stays = False

    def stay(self) -> None:
        """Keeps the folder for the next run, whatever happens."""
        self._stays = True

    def __enter__(self) -> Journal:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SetupError(f"folder `{self.folder.parent}` cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks.add(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise UsageError(f"another `osora data meta` is writing the table of `{self.folder}`") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stays and (kind is None or issubclass(kind, Exception)):
            shutil.rmtree(self.folder, ignore_errors=True)
        _locks.discard(self._lock)
        os.close(self._lock)

    def read(self) -> dict[str, Facts]:
        """Findings by file, those of files that have changed since left out."""
        found: dict[str, Facts] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            for entry in _entries(file):
                if entry["stamp"] == stamp_of(entry["path"]):
                    found[entry["path"]] = Facts(*entry["facts"])
        return found

    def forget_faults(self, found: dict[str, Facts]) -> dict[str, Facts]:
        """Only what is good: a file that could not be read gets another try in a new run."""
        return {path: facts for path, facts in found.items() if facts.reason is None}

    def skip_old(self) -> None:
        """Counts from here on."""
        self.count_new()
        self._count = 0

    def count_new(self) -> int:
        """Findings written since `skip_old`, by all processes."""
        for file in self.folder.glob("*.jsonl"):
            with file.open("rb") as opened:
                opened.seek(self._offsets.get(file, 0))
                data = opened.read()
            self._offsets[file] = self._offsets.get(file, 0) + len(data)
            self._count += data.count(b"\n")
        return self._count


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        for line in opened:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut off by a full disk or a crash of the machine
            if isinstance(entry, dict):
                yield entry


def stamp_of(path: str) -> Stamp:
    """Size and time of change of a file: facts are of use as long as it has these."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
