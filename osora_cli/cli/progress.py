"""How far a command has come, on stderr: a bar that moves on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import typer

from osora_cli.cli.output import Output

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class Progress:
    """Called with (done, total, ...); says `label: done of total unit`, and nothing when the output is quiet."""

    def __init__(self, output: Output, label: str, unit: str) -> None:
        self._label, self._unit = label, unit
        self._on = not output.quiet
        self._moving = self._on and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._every = _REDRAW_SECONDS if self._moving else _LINE_SECONDS
        self._last = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int | None = None, *_: object, detail: str = "") -> None:
        """`detail` says what is in work at the moment."""
        now = time.monotonic()
        finished = total is not None and done >= total
        if not self._on or (now - self._last < self._every and not (finished and self._bar is not None)):
            return
        self._last = now
        if self._moving:
            self._draw(done, total, detail)
            return
        of = f" of {total}" if total is not None else ""
        more = f", {detail}" if detail else ""
        typer.echo(f"{self._label}: {done}{of} {self._unit}{more}", err=True)

    def _draw(self, done: int, total: int | None, detail: str) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._unit)
            self._task = self._bar.add_task(self._label)
            self._bar.start()
        assert self._task is not None
        label = f"{self._label} ({detail})" if detail else self._label
        self._bar.update(self._task, completed=done, total=total, description=label, refresh=True)

    def close(self) -> None:
        """Take the bar away, so that what follows starts on a line of its own."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(unit: str) -> Bar:
    # Only a terminal needs rich, which costs a tenth of a second to import.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
