"""What a run says: a progress bar on a terminal, else one line a logged update; and log.txt in the run's folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from osora_cli.report.base import Record, RunStart, SaveEvent, SilentObserver
from osora_cli.report.lines import evaluation_line, event_line, save_line, time_left, update_line
from osora_cli.report.memory import peak_memory_gib

LOG_NAME = "log.txt"


class Pace:
    """Seconds left, from the mean time of an update since the start (saves and waiting for data included)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_update = 0
        self._total: int | None = None
        self._started = clock()

    def start(self, info: RunStart) -> None:
        self._start_update, self._total, self._started = info.start_update, info.total_updates, self._clock()

    @property
    def total(self) -> int | None:
        return self._total

    def left(self, update: int) -> float | None:
        """Seconds, or None while nothing is known."""
        done = update - self._start_update
        if self._total is None or done <= 0:
            return None
        return (self._clock() - self._started) / done * (self._total - update)

    def line(self, record: Record) -> str:
        with_memory = {"peak_memory_gib": peak_memory_gib(), **record}
        return update_line(with_memory, self._total, self.left(int(record["step"])))


class LogFile(SilentObserver):
    """RUN/log.txt: every line with its time, appended over all resumes of the run."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._before_start: list[str] = []
        self._pace = Pace()

    def on_start(self, info: RunStart) -> None:
        self._pace.start(info)
        self._file = (info.folder / LOG_NAME).open("a", encoding="utf-8", buffering=1)
        self._write(f"resumed after update {info.start_update}" if info.start_update else "started")
        for text in self._before_start:
            self._write(text)
        self._before_start.clear()

    def on_log(self, record: Record) -> None:
        self._write(self._pace.line(record))

    def on_event(self, kind: str, text: str, data: Record) -> None:
        if self._file is None:
            self._before_start.append(event_line(kind, text))
        self._write(event_line(kind, text))

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._write(evaluation_line(update, scores))

    def on_save(self, event: SaveEvent) -> None:
        self._write(save_line(event))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        if self._file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))


class ConsoleReport(SilentObserver):
    """Speaks on stderr. A terminal gets a bar; anything else one plain line a logged update.

    Args:
        quiet: only warnings, errors and failed saves are said.
        stream: where to; stderr as it is when the run starts by default. NO_COLOR is obeyed.
    """

    def __init__(self, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = stream
        self._pace = Pace()
        self._console: Console | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def on_start(self, info: RunStart) -> None:
        self._pace.start(info)
        self._console = Console(file=self._stream or sys.stderr)
        # FORCE_COLOR makes rich take a file for a terminal, and a dumb terminal cannot draw a line anew.
        if self._console.file.isatty() and not self._console.is_dumb_terminal and not self._quiet:
            columns = (TextColumn("update"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, refresh_per_second=2)
            self._task = self._bar.add_task("", total=info.total_updates, completed=info.start_update)
            self._bar.start()

    def on_update(self, record: Record) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=int(record["step"]))

    def on_log(self, record: Record) -> None:
        if self._bar is None:
            self._say(self._pace.line(record))
            return
        left = self._pace.left(int(record["step"]))
        parts = [f"{name} {record[name]:.4g}" for name in ("loss", "lr") if isinstance(record.get(name), (int, float))]
        parts += [time_left(left) + " left"] if left is not None else []
        self._bar.update(self._task, completed=int(record["step"]), description=", ".join(parts))

    def on_event(self, kind: str, text: str, data: Record) -> None:
        self._say(event_line(kind, text), urgent=kind != "note")

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._say(evaluation_line(update, scores))

    def on_save(self, event: SaveEvent) -> None:
        self._say(save_line(event), urgent=event.error is not None)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str, urgent: bool = False) -> None:
        if self._quiet and not urgent:
            return
        if self._console is None:  # something to say before the start
            self._console = Console(file=self._stream or sys.stderr)
        # No markup, highlighting or wrapping: paths and brackets come out as they are, a line stays one line.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
