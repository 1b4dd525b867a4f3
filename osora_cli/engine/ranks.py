"""The processes of a run, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Ranks:
    """One process among all.

    Attributes:
        rank, world_size: this process, and how many there are.
        local_rank: its number on this machine.
        host_group: a gloo group of all ranks for small things of the host's, None with one process.
        store: where ranks leave words for each other without a collective.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host_group: Any = None
    store: Store | None = None

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks (one collective)."""
        if self.world_size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.world_size


SINGLE_RANK = Ranks()
