"""What several ranks hold has to be the same on each: they sum it up before they share out who writes which part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from osora_cli.checkpoint.plan import Plan, Replica
from osora_cli.checkpoint.staging import byte_view

_WORD = 8


def word_sum(tensor: Tensor) -> Tensor:
    """The bytes as 64-bit words, summed modulo 2**64, on the tensor's device: an int64 scalar.

    One pass at the speed of the memory, no wait for the device. Sees every change of one value, and but for a chance of
    2**-64 any others; only values that changed places go unseen.
    """
    data = byte_view(tensor)
    if data.storage_offset() % _WORD:
        data = data.clone()
    whole = data.numel() - data.numel() % _WORD
    total = data[:whole].view(torch.int64).sum()
    return total if whole == data.numel() else total + _tail(data[whole:])


def _tail(data: Tensor) -> Tensor:
    """Up to 7 bytes as one word."""
    padded = data.new_zeros(_WORD)
    padded[: data.numel()] = data
    return padded.view(torch.int64)[0]


class ReplicaSums:
    """The sums of a rank's replicas, ordered on the device when this is made, behind all that changed them before."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sums = torch.stack([word_sum(tensor) for tensor in tensors]) if tensors else None

    def read(self) -> list[int]:
        """Wait for the sums."""
        return [] if self._sums is None else [int(value) for value in self._sums.tolist()]


def disagreements(plan: Plan, sums: Sequence[Sequence[int]]) -> Iterator[tuple[Replica, list[list[int]]]]:
    """Replicas that are not the same on all their ranks, each with its ranks by what they hold.

    Args:
        sums: of each rank, in the order of the plan's replicas that it holds.
    """
    mine = [iter(of_rank) for of_rank in sums]
    for replica in plan.replicas:
        found: dict[int, list[int]] = {}
        for rank in replica.ranks:
            found.setdefault(next(mine[rank]), []).append(rank)
        if len(found) > 1:
            yield replica, sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def agreement_fault(plan: Plan, sums: Sequence[Sequence[int]]) -> str | None:
    """What to say where ranks that hold the same do not hold the same; None where they do."""
    found = list(disagreements(plan, sums))
    if not found:
        return None
    replica, sides = found[0]
    others = f", nor on {len(found) - 1} more tensors" if len(found) > 1 else ""
    told = " and ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in sides)
    return f"the ranks do not agree on `{replica.key}` of `{replica.group}`: {told} hold different values{others}"
