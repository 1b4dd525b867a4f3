"""A run's records, read back: what was logged, scored and saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.metrics.plateau import Trend, trend
from osora_cli.report.jsonl import EVAL_KIND, FILE_NAME, SAVE_KIND

# The loss whose end decides: independent of the size of clips where the task logs it so.
LOSSES = ("rec_per_pixel", "loss")


@dataclass
class History:
    """Records by update, each once (of several of one update the last), in order.

    Attributes:
        updates: logged updates, as in metrics.jsonl.
        evaluations: evaluations, likewise; scores as `eval/NAME`.
        saves: saves, likewise; `save/stall` and the like, or `save/error`.
    """

    updates: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)

    @property
    def loss_name(self) -> str:
        """The loss that `trend` looks at."""
        held = self.updates[-1] if self.updates else {}
        return next((name for name in LOSSES if name in held), LOSSES[-1])

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Updates and values of one field, where it is a number; the strings "nan" and "inf" count as such.

        `eval/...` is of the evaluations, `save/...` of the saves.
        """
        kind, _, rest = name.partition("/")
        records = {EVAL_KIND: self.evaluations, SAVE_KIND: self.saves}.get(kind, []) if rest else self.updates
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
    found: dict[str | None, dict[int, dict[str, Any]]] = {None: {}, EVAL_KIND: {}, SAVE_KIND: {}}
    for line in (run / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            continue
        found.get(record.get("kind"), {})[step] = record
    return History(*([held[step] for step in sorted(held)] for held in found.values()))
