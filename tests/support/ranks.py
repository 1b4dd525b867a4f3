"""Several ranks in one process: threads that meet at a barrier, and ways to split tensors over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from osora_cli.tensors import TensorShard

T = TypeVar("T")
Split = Literal["flat", "rows", "replicated", "first", "mesh"]


class _Meeting:
    """The values of one gather after the other."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout)


class ThreadComm:
    """One rank of several that run as threads."""

    def __init__(self, meeting: _Meeting, rank: int, world_size: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = world_size

    def gather(self, value: T) -> list[T]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values


def run_ranks(world_size: int, body: Callable[[ThreadComm], T], timeout: float = 60.0) -> list[T | Exception]:
    """Run `body` once a rank, each in its thread; returns what each returned or raised."""
    meeting = _Meeting(world_size, timeout)
    results: list[Any] = [None] * world_size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadComm(meeting, rank, world_size))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def bounds(shape: tuple[int, ...], rank: int, world_size: int, how: Split) -> tuple[int, int]:
    """(first element, count) that a rank holds."""
    numel = 1
    for size in shape:
        numel *= size
    if how == "replicated":
        return 0, numel
    if how == "first":  # all on one rank that is not rank 0 where there is one
        return (0, numel) if rank == world_size - 1 else (0, 0)
    if how == "mesh" and world_size > 1 and world_size % 2 == 0:  # sharded over half the ranks, replicated over two
        rank, world_size = rank % (world_size // 2), world_size // 2
    unit = numel // shape[0] if how == "rows" and shape and shape[0] else 1
    chunk = -(-(numel // unit if unit else 0) // world_size) * unit
    start = min(numel, rank * chunk)
    return start, min(numel, start + chunk) - start


def shards_of(table: dict[str, torch.Tensor], rank: int, world_size: int, how: Split) -> list[TensorShard]:
    """A rank's shards of whole tensors, each a tensor of its own."""
    shards = []
    for key, tensor in table.items():
        start, count = bounds(tuple(tensor.shape), rank, world_size, how)
        part = tensor.contiguous().reshape(-1)[start : start + count].clone()
        shards.append(TensorShard(key, tuple(tensor.shape), start, part))
    return shards
