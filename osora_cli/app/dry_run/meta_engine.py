"""An engine of shapes: a task's own forward and backward run on it, and nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osora_cli.engine.base import OptimSettings, Trained, UpdateResult, named_trainable
from osora_cli.engine.ranks import Ranks
from osora_cli.tensors import TensorShard, plain_key


@dataclass(frozen=True)
class NetworkSize:
    """A trained network in bytes, on one rank that shares nothing.

    Attributes:
        name: its part in a checkpoint.
        parameters, trained: numbers of values.
        weights: of the working weights and buffers.
        masters: of fp32 copies; 0 where the weights are fp32 themselves.
        gradients: fp32.
        moments: AdamW's two, fp32.
    """

    name: str
    parameters: int
    trained: int
    weights: int
    masters: int
    gradients: int
    moments: int


class MetaTrained:
    """A network on the meta device, whose gradients live as the native engine's do."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        self.module = module.to(compute_dtype)
        self.compute_dtype = compute_dtype
        self.is_own_master = compute_dtype is torch.float32
        self._gradients: dict[int, torch.Tensor] = {}
        if not self.is_own_master:
            for _, p in named_trainable(self.module):
                p.register_post_accumulate_grad_hook(self._move)

    def _move(self, p: torch.Tensor) -> None:
        if id(p) not in self._gradients:
            assert p.grad is not None
            self._gradients[id(p)] = p.grad.to(torch.float32)
        p.grad = None

    def size(self, name: str) -> NetworkSize:
        trained = sum(p.numel() for _, p in named_trainable(self.module))
        state = self.module.state_dict().values()
        return NetworkSize(
            name,
            sum(p.numel() for p in self.module.parameters()),
            trained,
            sum(t.numel() * t.element_size() for t in state),
            0 if self.is_own_master else 4 * trained,
            4 * trained,
            8 * trained,
        )

    def drop_gradients(self) -> None:
        """As an update does: the next step makes its own."""
        self._gradients.clear()
        self.module.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        raise RuntimeError("nothing is trained on the meta device")

    def model_shards(self) -> list[TensorShard]:
        return [TensorShard.whole(plain_key(k), t) for k, t in self.module.state_dict().items()]

    def master_shards(self) -> list[TensorShard]:
        return [TensorShard.whole(plain_key(k), p.detach()) for k, p in named_trainable(self.module)]

    def optimizer_shards(self) -> list[TensorShard]:
        return []

    def param_groups(self) -> list[dict[str, Any]]:
        return []

    def set_lr(self, lr: float) -> None: ...

    def sync_buffers(self) -> None: ...

    def masters_changed(self) -> None: ...


class MetaEngine:
    """One rank without a device. `trained` has every network that was prepared, in order."""

    name = "native"
    rank = 0
    world_size = 1
    plugin = "none"

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.device = torch.device("meta")
        self.ranks = Ranks()
        self.notes: list[str] = []
        self.trained: list[MetaTrained] = []
        self._compute_dtype = compute_dtype

    def prepare(self, module: nn.Module, optim: OptimSettings) -> Trained:
        self.trained.append(MetaTrained(module.to(self.device), self._compute_dtype))
        return self.trained[-1]

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers of all networks."""
        for network in self.trained:
            yield from network.module.parameters()
            yield from network.module.buffers()
