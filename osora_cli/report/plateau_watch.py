"""Says in the log what the loss does: whether it still falls, or since when it is flat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osora_cli.report.base import Record, RunStart, SilentObserver
from osora_cli.report.history import LOSSES, History, read_history
from osora_cli.report.lines import trend_line


class PlateauWatch(SilentObserver):
    """Looks at the curve after each evaluation; in a run without any, every `every_logs` logged updates.

    Args:
        tell: where the line goes.
        advice: what to do once the loss is flat; None: nothing is advised.
    """

    def __init__(self, tell: Callable[[str], None], advice: str | None = None, every_logs: int = 100) -> None:
        self._tell, self._advice, self._every_logs = tell, advice, every_logs
        self._history = History()
        self._logs = 0
        self._evaluated = False

    def on_start(self, info: RunStart) -> None:
        with suppress(FileNotFoundError):
            past = read_history(info.folder)
            self._history.updates = [_kept(r) for r in past.updates if r["step"] <= info.start_update]

    def on_log(self, record: Record) -> None:
        self._history.updates.append(_kept(record))
        self._logs += 1
        if not self._evaluated and self._logs % self._every_logs == 0:
            self._look()

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._evaluated = True
        self._look()

    def _look(self) -> None:
        line = trend_line(self._history.trend(), self._history.loss_name, self._advice)
        if line is not None:
            self._tell(line)


def _kept(record: Record) -> dict[str, Any]:
    """What is looked at of a record: a run may have hundreds of thousands."""
    return {name: record[name] for name in ("step", *LOSSES) if name in record}
