"""Exponential moving average of the weights, in fp32, next to the masters it follows.

A bf16 average does not move once decay is close to 1 (the update rounds away), so the average is fp32 whatever the
computation's dtype. It is made from the masters' own shards, and is therefore sharded as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from osora_cli.engine.base import Trained
from osora_cli.tensors import TensorShard


class Ema:
    """e = decay * e + (1 - decay) * p after each update; no warm-up, no bias correction."""

    def __init__(self, masters: Sequence[TensorShard], decay: float) -> None:
        self.decay = decay
        self._masters = [m.tensor for m in masters]
        self._shards = [
            TensorShard(m.key, m.shape, m.start, m.tensor.detach().clone().to(torch.float32)) for m in masters
        ]
        pairs = [(s.tensor, m) for s, m in zip(self._shards, self._masters, strict=True) if m.numel()]
        on_gpu = [pair for pair in pairs if pair[0].is_cuda]
        self._one_by_one = [pair for pair in pairs if not pair[0].is_cuda]
        self._follower = follower(on_gpu, decay) if on_gpu else None

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Follow the masters. `skipped` (0-d, 1.0 or 0.0): an update that changed nothing does not move the average."""
        if self._follower is not None:
            self._follower.found_inf = skipped  # type: ignore[attr-defined]
            self._follower.step()
        if self._one_by_one:
            weight = ((1.0 - self.decay) * (1.0 - skipped)).to(self._one_by_one[0][0].device)  # offloaded masters
            for average, master in self._one_by_one:
                average.lerp_(master, weight)

    def shards(self) -> list[TensorShard]:
        """The average's live tensors."""
        return self._shards

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the masters."""
        for average, master in zip(self._shards, self._masters, strict=True):
            average.tensor.copy_(master)

    @contextmanager
    def swapped(self, network: Trained) -> Iterator[None]:
        """The average stands in the place of the masters meanwhile; after it every bit is where it was.

        Values change places tensor by tensor, so that no second copy of the weights is needed. Nothing may copy the
        weights at the time (a save in flight), nor train.
        """
        self._swap(network)
        try:
            yield
        finally:
            self._swap(network)

    @torch.no_grad()
    def _swap(self, network: Trained) -> None:
        for average, master in zip(self._shards, self._masters, strict=True):
            held = average.tensor.clone()
            average.tensor.copy_(master)
            master.copy_(held)
        network.masters_changed()


def follower(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], decay: float) -> torch.optim.SGD:
    """An optimizer whose step moves each average e towards its master p: e <- e - (1 - decay) * (e - p).

    One pass over all tensors, and none where `found_inf` is 1: the decision stays on the device, which torch's own
    foreach lerp has no place for. It is plain SGD: the gradient p with its sign turned round, and a weight decay of 1.
    """
    for average, master in pairs:
        average.grad = master
    averages = [average for average, _ in pairs]
    return torch.optim.SGD(averages, lr=1.0 - decay, weight_decay=1.0, maximize=True, fused=True)
