"""The engine seam: who owns parameters, precision and sharding.

Everything above it (tasks, loop, checkpoints) is the same code for every engine, plugin and number of ranks. A task
gives the engine its networks; what it gets back is a `Trained`: the network and its optimizer as one thing, whose
state leaves and enters as `TensorShard`s.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from osora_cli.engine.ranks import Ranks
from osora_cli.tensors import TensorShard


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), in fp32."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update. Both values stay on the device: reading them is the reader's sync.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping, 0-d fp32.
        skipped: 1.0 if the gradient was not finite and nothing was changed, else 0.0; 0-d fp32.
    """

    grad_norm: torch.Tensor
    skipped: torch.Tensor


class Trained(Protocol):
    """A network and its optimizer, held by an engine."""

    module: nn.Module
    """The network to call; its parameters have the computation's dtype."""
    compute_dtype: torch.dtype
    is_own_master: bool
    """Whether the optimizer moves the module's own parameters (fp32 compute), or fp32 copies of them."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` (0-d, this rank's mean) to the masters' fp32 gradients, averaged over ranks."""

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """Clip to `max_norm` (0: no clipping), step with `lr`, clear gradients. Non-finite gradients are skipped."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for micro-batches that are not the last of an update: no gradient traffic between ranks."""

    def model_shards(self) -> list[TensorShard]:
        """Working weights and buffers, in state-dict order."""

    def master_shards(self) -> list[TensorShard]:
        """The fp32 parameters that the optimizer moves; live tensors, in parameter order."""

    def optimizer_shards(self) -> list[TensorShard]:
        """`state.{i}.{exp_avg|exp_avg_sq|step}`, i counting the optimizer's parameters; live tensors."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as plain values, with `params` as running indexes."""

    def set_lr(self, lr: float) -> None:
        """The learning rate that `param_groups` tells until the next update: a checkpoint's, after a load."""

    def sync_buffers(self) -> None:
        """Make buffers that each rank moves by itself (running statistics) equal on all: their mean. Before a save."""

    def masters_changed(self) -> None:
        """Tell the engine that masters were written from outside (a load): refresh the working weights."""


class Engine(Protocol):
    """One process's view of all of training's devices."""

    name: str
    plugin: str
    device: torch.device
    rank: int
    world_size: int

    def prepare(self, module: nn.Module, optim: OptimSettings) -> Trained:
        """Take over an fp32 `module` (on any device) and make its optimizer."""

    ranks: Ranks
    """All processes of the run."""
    notes: list[str]
    """What the user should be told of how it runs."""

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` over the ranks (one collective)."""


def named_trainable(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters that are trained, in the order in which the optimizer numbers them."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)
