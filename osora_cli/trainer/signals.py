"""Signals become wishes that the loop reads between updates."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals:
    """While entered: SIGINT and SIGTERM ask for a save and an end, SIGUSR1 for a save.

    A second SIGINT is Python's own KeyboardInterrupt: whoever presses twice wants out now. A third ends the process
    where it stands, whatever is still being put away.
    Outside the main thread nothing is installed, since Python allows handlers only there.
    """

    def __init__(self) -> None:
        self.stop_code: int | None = None
        self.save_wanted = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save_wanted = True
            return
        if number == signal.SIGINT and self.stop_code is not None:
            self._before.pop(number, None)  # this handler stays to the end
            signal.signal(number, lambda *_: os._exit(_EXIT_CODES[signal.SIGINT]))
            raise KeyboardInterrupt
        self.stop_code = _EXIT_CODES[signal.Signals(number)]
