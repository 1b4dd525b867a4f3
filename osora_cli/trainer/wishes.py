"""Signals, agreed on over the ranks: all of them stop, or save, at the same update."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from osora_cli.engine.ranks import Ranks
from osora_cli.trainer.signals import Signals


class Wishes:
    """What the signals of all ranks ask for. One process sees its own at once.

    With several, each update begins a small reduction over the host's group and reads that of the update before, so
    nothing waits: what one rank is told is every rank's wish two updates later.
    """

    def __init__(self, signals: Signals, ranks: Ranks) -> None:
        self._signals = signals
        self._ranks = ranks
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._stop_code: int | None = None
        self._save_wanted = False

    @property
    def stop_code(self) -> int | None:
        """The exit code that a signal asked for."""
        return self._signals.stop_code if self._ranks.world_size == 1 else self._stop_code

    @property
    def save_wanted(self) -> bool:
        return self._signals.save_wanted if self._ranks.world_size == 1 else self._save_wanted

    def saved(self) -> None:
        """The wish for a save is fulfilled."""
        if self._ranks.world_size == 1:
            self._signals.save_wanted = False
        self._save_wanted = False

    def exchange(self) -> None:
        """At each update, on all ranks."""
        if self._ranks.world_size == 1:
            return
        self.settle()
        mine = torch.tensor([self._signals.stop_code or 0, int(self._signals.save_wanted)])
        self._signals.save_wanted = False
        self._pending = (
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._ranks.host_group, async_op=True), mine,
        )  # fmt: skip

    def settle(self) -> None:
        """Read what is under way. Before other collectives of the host's group."""
        if self._pending is None:
            return
        work, agreed = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        code, save = (int(n) for n in agreed)
        self._stop_code = code or None
        self._save_wanted = self._save_wanted or bool(save)
