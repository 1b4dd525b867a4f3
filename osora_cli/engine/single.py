"""A network on one device: fp32 masters, and a working copy of them where the computation is in lower precision.

With bf16 compute the module's own parameters are a bf16 working copy: each gradient is added to its master's fp32
gradient as soon as it is complete and then freed, so accumulation over micro-batches is in fp32 and working weights
are bf16(master), bit for bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from osora_cli.engine import adamw
from osora_cli.engine.adamw import Master
from osora_cli.engine.base import OptimSettings, UpdateResult, named_trainable
from osora_cli.tensors import TensorShard, plain_key


class NativeTrained:
    """A network on one device with its fused AdamW."""

    def __init__(
        self, module: nn.Module, optim: OptimSettings, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        self.compute_dtype = compute_dtype
        self.is_own_master = compute_dtype is torch.float32
        self.device = device
        module = module.to(device)
        trainable = list(named_trainable(module))
        self._working: list[nn.Parameter] | None = None
        if self.is_own_master:
            self.module = module
            tensors = [p for _, p in trainable]
        else:
            tensors = [nn.Parameter(p.detach().clone()) for _, p in trainable]
            self.module = module.to(compute_dtype)
            self._working = [p for _, p in named_trainable(self.module)]
            for working, master in zip(self._working, tensors, strict=True):
                self._move_gradients(working, master)
        self._masters = [
            Master(plain_key(name), tuple(p.shape), 0, p) for (name, _), p in zip(trainable, tensors, strict=True)
        ]
        self._optimizer = self._make_optimizer(optim)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """The fp32 parameters that gradients arrive at."""
        return [m.tensor for m in self._masters]

    def _make_optimizer(self, optim: OptimSettings) -> torch.optim.Optimizer:
        return adamw.make_adamw(self._parameters, optim)

    def _move_gradients(self, working: nn.Parameter, master: nn.Parameter) -> None:
        """Add each finished gradient of `working` to `master.grad` in fp32 and free it."""

        def move(p: torch.Tensor) -> None:
            if p.grad is None or not self._moves_gradients():
                return
            if master.grad is None:
                master.grad = p.grad.to(master.dtype)
            else:
                master.grad.add_(p.grad)
            p.grad = None

        working.register_post_accumulate_grad_hook(move)

    def _moves_gradients(self) -> bool:
        """Whether gradients go to the masters as they are; else someone else brings them there."""
        return True

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        norm = adamw.global_norm([p.grad for p in self._parameters if p.grad is not None], self.device)
        skipped = adamw.clip(self._parameters, norm, max_norm)
        self._step(lr, skipped)
        for p in self._parameters:
            p.grad = None
        self._refresh_working()
        return UpdateResult(norm, skipped)

    def _step(self, lr: float, skipped: torch.Tensor) -> None:
        adamw.step(self._optimizer, lr, skipped)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def masters_changed(self) -> None:
        self._refresh_working()

    @torch.no_grad()
    def _refresh_working(self) -> None:
        if self._working is not None:
            torch._foreach_copy_(list[torch.Tensor](self._working), list[torch.Tensor](self._parameters))

    def sync_buffers(self) -> None:
        return

    def model_shards(self) -> list[TensorShard]:
        return [TensorShard.whole(plain_key(k), t.detach()) for k, t in self.module.state_dict().items()]

    def master_shards(self) -> list[TensorShard]:
        return [m.shard() for m in self._masters]

    def optimizer_shards(self) -> list[TensorShard]:
        return [
            shard
            for i, master in enumerate(self._masters)
            for shard in adamw.state_shards(self._optimizer, i, master, held=True)
        ]

    def param_groups(self) -> list[dict[str, Any]]:
        return plain_groups(self._optimizer, len(self._masters))


def plain_groups(optimizer: torch.optim.Optimizer, parameters: int) -> list[dict[str, Any]]:
    """The optimizer's one group as plain values; `params` counts all parameters, also those that other ranks hold."""
    (group,) = optimizer.param_groups
    # In the order of AdamW's own defaults: a wrapper may keep another, and files are to be the same for all plugins.
    names = [*optimizer.defaults, *(name for name in group if name not in optimizer.defaults)]
    values = {name: group[name] for name in names if name in group and name != "params"}
    return [{**values, "params": list(range(parameters))}]
