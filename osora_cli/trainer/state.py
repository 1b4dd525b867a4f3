"""Where a run stands. Counters are carried from step to step, never derived from steps per epoch."""

from __future__ import annotations

from dataclasses import dataclass

from osora_cli.checkpoint.counters import Counters


@dataclass
class Progress:
    """The counters of a run.

    Attributes:
        epoch: current pass over the table, from 0.
        step: micro-batches done in this epoch.
        global_step: micro-batches done in all.
        update: optimizer updates done in all; the number in a checkpoint's name.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    update: int = 0

    def counters(self, batch_size: int | None) -> Counters:
        return Counters(self.epoch, self.step, self.global_step, batch_size, self.update)

    @classmethod
    def of(cls, counters: Counters) -> Progress:
        return cls(counters.epoch, counters.step, counters.global_step, counters.actual_update_step)
