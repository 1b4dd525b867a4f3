"""Learning rate as a function of the update's number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from `initial_lr`, then constant, or a cosine to 0 over `total` updates.

    Attributes:
        base_lr: learning rate after the warm-up.
        warmup_steps: updates of warm-up; 0: none.
        initial_lr: where a warm-up without cosine starts from.
        total: updates of the whole run; needed for the cosine only.
    """

    base_lr: float
    warmup_steps: int = 0
    initial_lr: float = 1e-6
    cosine: bool = False
    total: int | None = None

    def lr(self, update: int) -> float:
        """Learning rate of update number `update`, counted from 0."""
        if self.cosine:
            return self._cosine(update)
        if update >= self.warmup_steps:
            return self.base_lr
        return self.initial_lr + (update + 1) / (self.warmup_steps + 1) * (self.base_lr - self.initial_lr)

    def _cosine(self, update: int) -> float:
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps * self.base_lr
        if self.total is None:
            raise ValueError("a cosine schedule needs the number of updates")
        span = max(1, self.total - self.warmup_steps)
        done = min(1.0, (update - self.warmup_steps) / span)
        return self.base_lr * 0.5 * (1 + math.cos(math.pi * done))

    def state(self, update: int) -> dict[str, Any]:
        """What a checkpoint keeps; key names as in the reference's scheduler."""
        return {
            "last_epoch": update,
            "base_lrs": [self.base_lr],
            "warmup_steps": self.warmup_steps,
            "initial_lr": self.initial_lr,
            "_last_lr": [self.lr(update)],
            "cosine": self.cosine,
            "total_steps": self.total,
        }
