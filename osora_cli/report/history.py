"""A run's records, read back: what was logged, scored and saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.metrics.plateau import Trend, trend
from osora_cli.report.console import LOG_NAME
from osora_cli.report.jsonl import EVAL_KIND, FILE_NAME
from osora_cli.report.lines import SAVED

# The loss whose end decides: independent of the size of clips where the task logs it so.
LOSSES = ("rec_per_pixel", "loss")


@dataclass
class History:
    """Records by update, each once (of several of one update the last), in order.

    Attributes:
        updates: logged updates, as in metrics.jsonl.
        evaluations: evaluations, likewise; scores as `eval/NAME`.
        saves: `step`, `gb`, `seconds`, `stall` of committed checkpoints, from the log.
    """

    updates: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, float]] = field(default_factory=list)

    @property
    def loss_name(self) -> str:
        """The loss that `trend` looks at."""
        held = self.updates[-1] if self.updates else {}
        return next((name for name in LOSSES if name in held), LOSSES[-1])

    def series(self, name: str, *, evaluations: bool = False) -> tuple[list[int], list[float]]:
        """Updates and values of one field, where it is a number; the strings "nan" and "inf" count as such."""
        records = self.evaluations if evaluations else self.updates
        pairs = [(int(r["step"]), number(r[name])) for r in records if r.get(name) is not None]
        known = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    def trend(self) -> Trend:
        """What the loss does at the end of the curve."""
        return trend(*self.series(self.loss_name))


def number(value: Any) -> float | None:
    """A value of a record as a float, None where it is none."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def read_history(run: Path) -> History:
    """The records of a run's folder. Lines that a killed process cut are passed over.

    Raises:
        FileNotFoundError: the folder holds no metrics.jsonl.
    """
    updates: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for line in (run / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            continue
        kind = record.get("kind")
        if kind is None:
            updates[step] = record
        elif kind == EVAL_KIND:
            evaluations[step] = record
    return History(_ordered(updates), _ordered(evaluations), _saves(run / LOG_NAME))


def _ordered(held: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [held[step] for step in sorted(held)]


def _saves(log: Path) -> list[dict[str, float]]:
    if not log.is_file():
        return []
    found: dict[int, dict[str, float]] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = SAVED.search(line)
        if match:
            found[int(match["step"])] = {name: float(value) for name, value in match.groupdict().items()}
    return [found[step] for step in sorted(found)]
