"""AdamW in fp32 as every plugin runs it: states made at once, one fused step, non-finite gradients passed over.

The kernel works element by element, so a rank that holds a part of a parameter computes the same bits for it as one
that holds all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from osora_cli.engine.base import OptimSettings, UpdateResult
from osora_cli.tensors import TensorShard

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Master:
    """A rank's part of one fp32 parameter.

    Attributes:
        key: the parameter's name without wrappers' levels.
        shape: of the whole parameter.
        start: first element that `tensor` holds, in row-major order.
        tensor: the local elements; empty where this rank holds none.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: nn.Parameter

    def shard(self) -> TensorShard:
        return TensorShard(self.key, self.shape, self.start, self.tensor.detach())


def make_adamw(params: Sequence[nn.Parameter], optim: OptimSettings) -> torch.optim.AdamW:
    """The optimizer over what this rank holds, its states made."""
    optimizer = torch.optim.AdamW(
        [{"params": list(params)}], lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay,
        fused=True,
    )  # fmt: skip
    make_states(optimizer, params)
    return optimizer


def make_states(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Zero moments and steps. At once rather than at the first step: a save at any time is whole, and a load has
    somewhere to go."""
    for p in params:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }


def clip(params: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale the gradients to a norm of at most `max_norm` (0: leave them); gives 1.0 where they are not finite."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(list(params), max_norm, norm)
    return (~torch.isfinite(norm)).to(torch.float32)


def step(optimizer: torch.optim.Optimizer, lr: float, skipped: torch.Tensor) -> None:
    """One step at learning rate `lr`; none where `skipped` (0-d) is 1.0."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    # The fused kernel leaves everything as it is when found_inf is 1: the decision stays on the device.
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()


def state_shards(
    optimizer: torch.optim.Optimizer, index: int, master: Master, *, held: bool | None = None
) -> list[TensorShard]:
    """A parameter's states as shards of the whole. Its step is everywhere the same: all that hold a part give it.

    Args:
        held: whether this rank's optimizer moves the parameter; None: where it holds elements of it.
    """
    kinds: dict[str, tuple[tuple[int, ...], int]] = dict.fromkeys(STATE_NAMES, (master.shape, master.start))
    kinds["step"] = ((), 0)
    held = master.tensor.numel() > 0 if held is None else held
    if held:
        state = optimizer.state[master.tensor]
        return [TensorShard(f"state.{index}.{name}", *kinds[name], state[name]) for name in STATE_NAMES]
    # Named all the same: the order of the keys in the files must not depend on who holds what.
    empty = master.tensor.new_empty(0, dtype=torch.float32)
    return [TensorShard(f"state.{index}.{name}", kinds[name][0], 0, empty) for name in STATE_NAMES]


def global_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """L2 norm of all gradients of this rank together, 0-d."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(gradients)


def updated(norm: torch.Tensor, skipped: torch.Tensor, device: torch.device) -> UpdateResult:
    """The result on the computation's device, where it is read together with the losses."""
    return UpdateResult(norm.to(device), skipped.to(device))
