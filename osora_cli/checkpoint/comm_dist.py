"""`Comm` over a gloo group. Values travel in Python's marshal format: plain values only, nothing that runs code."""

from __future__ import annotations

import marshal
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class DistComm:
    """The ranks of a gloo group.

    Args:
        group: a gloo group of all ranks, used for nothing else: a save talks from a thread of its own.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank.

        Raises:
            RuntimeError: a rank is gone, or did not come in the group's time.
            TypeError: the value is no plain value.
        """
        try:
            data = marshal.dumps(cast(Any, value))
        except ValueError:
            raise TypeError(f"a value of type {type(value).__name__} holds more than plain values") from None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        lengths = [int(size.item()) for size in sizes]
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        return [
            cast(T, marshal.loads(part.numpy()[:length].tobytes())) for part, length in zip(parts, lengths, strict=True)
        ]
