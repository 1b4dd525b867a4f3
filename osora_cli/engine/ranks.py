"""The processes of a run, as one of them sees them."""

from __future__ import annotations

from collections.abc import Sequence
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
        sequence: neighbouring ranks that share one sample's tokens.
        store: where ranks leave words for each other without a collective.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host_group: Any = None
    store: Store | None = None
    sequence: int = 1

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def data_replicas(self) -> int:
        """Ranks, or groups of them, that train on different samples."""
        return self.world_size // self.sequence

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks (one collective)."""
        if self.world_size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.world_size

    def gather_numbers(self, values: Sequence[int]) -> list[int]:
        """The whole numbers of all ranks, one rank's after the other's (two collectives of the host)."""
        if self.world_size == 1:
            return list(values)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([len(values)]), group=self.host_group)
        lengths = [int(count) for count in counts]
        mine = torch.zeros(max(lengths), dtype=torch.int64)
        mine[: len(values)] = torch.tensor(values, dtype=torch.int64)
        parts = [torch.zeros_like(mine) for _ in lengths]
        dist.all_gather(parts, mine, group=self.host_group)
        return [n for part, length in zip(parts, lengths, strict=True) for n in part[:length].tolist()]


SINGLE_RANK = Ranks()
