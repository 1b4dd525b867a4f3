"""Saves by the clock: `ckpt_every_minutes`."""

from __future__ import annotations

import time

import torch

from osora_cli.engine.base import Engine


class SaveClock:
    """Whether it is time for a save, the same answer on all ranks.

    Args:
        minutes: between saves; None: never by the clock.
        every: several ranks ask at every so many updates only, where they wait for each other anyway (the logged ones).
        engine: who decides together; rank 0's clock counts.
    """

    def __init__(self, minutes: float | None, every: int, engine: Engine) -> None:
        self._minutes = minutes
        self._every = every
        self._engine = engine
        self._saved_at = time.monotonic()

    def saved(self) -> None:
        """A save begins: the next is due `minutes` from now."""
        self._saved_at = time.monotonic()

    def is_up(self, update: int) -> bool:
        """After this update. Called by all ranks."""
        if self._minutes is None or (self._engine.world_size > 1 and update % self._every):
            return False
        due = time.monotonic() - self._saved_at >= 60 * self._minutes
        if self._engine.world_size == 1:
            return due
        told = torch.tensor([float(due and self._engine.rank == 0)], device=self._engine.device)
        return bool(self._engine.mean_over_ranks(told).item() > 0)
