"""How far a command has come, on stderr: one line that moves on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

import typer

from osora_cli.cli.output import Output

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class Progress:
    """Called with (done, total, ...); says `label: done of total unit`, and nothing when the output is quiet."""

    def __init__(self, output: Output, label: str, unit: str) -> None:
        self._label, self._unit = label, unit
        self._on = not output.quiet
        self._moving = self._on and sys.stderr.isatty()
        self._every = _REDRAW_SECONDS if self._moving else _LINE_SECONDS
        self._last = time.monotonic()
        self._open = False

    def __call__(self, done: int, total: int | None = None, *_: object, detail: str = "") -> None:
        """`detail` follows the numbers."""
        now = time.monotonic()
        finished = total is not None and done >= total
        if not self._on or (now - self._last < self._every and not (finished and self._open)):
            return
        self._last = now
        text = f"{self._label}: {done}{f' of {total}' if total is not None else ''} {self._unit}"
        text += f", {detail}" if detail else ""
        typer.echo(f"\r\033[K{text}" if self._moving else text, nl=not self._moving, err=True)
        self._open = self._moving

    def close(self) -> None:
        """End the moving line, so that what follows starts on a line of its own."""
        if self._open:
            typer.echo("\r\033[K", nl=False, err=True)
            self._open = False
