"""`plugin: ddp` and `zero1`: the whole network on each rank, gradients averaged by DistributedDataParallel.

With bf16 compute DDP would sum bf16 gradients. A communication hook takes its buckets instead: it adds what earlier
micro-batches left in the masters' fp32 gradients, reduces in fp32, and leaves the mean there.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from osora_cli.engine import adamw
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.buffers import average_buffers
from osora_cli.engine.single import NativeTrained, plain_groups
from osora_cli.tensors import TensorShard


class Ddp(DistributedDataParallel):
    """DDP that shows the network's own attributes, and stands aside while the network is frozen or only looked at.

    A frozen network (the discriminator, while the autoencoder learns) gets no gradients: DDP would wait for them.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
        return super().forward(*inputs, **kwargs) if trains else self.module(*inputs, **kwargs)  # type: ignore[no-untyped-call]


def _buffers_stay() -> dict[str, Any]:
    """DDP's option that each rank moves its own buffers, by the name that this torch has for it."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


class DdpTrained(NativeTrained):
    """A network on each rank with gradients averaged over all.

    Args:
        bucket_mib: gradients that are reduced at a time, MiB.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimSettings,
        device: torch.device,
        compute_dtype: torch.dtype,
        bucket_mib: int = 25,
    ) -> None:
        super().__init__(module, optim, device, compute_dtype)
        options: dict[str, Any] = {
            "device_ids": [device.index] if device.type == "cuda" else None,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": bucket_mib,
            # Without it DDP lays its buckets out anew after the first step, in the order of that step: a resumed run
            # would sum in another order than the run that went on.
            "find_unused_parameters": True,
        }
        self._ddp = self._wrap(self.module, options)
        if self._working is not None:
            self._master_of: dict[torch.Tensor, nn.Parameter] = dict(zip(self._working, self._parameters, strict=True))
            # DDP looks at a hook's annotations, which here are strings: a lambda has none.
            self._ddp.register_comm_hook(None, lambda _, bucket: self._reduce_in_fp32(bucket))
        self.module = self._ddp

    def _wrap(self, module: nn.Module, options: dict[str, Any]) -> Ddp:
        return Ddp(module, **options, **_buffers_stay())

    def _moves_gradients(self) -> bool:
        return not self._ddp.require_backward_grad_sync

    def _reduce_in_fp32(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = torch.empty_like(bucket.buffer(), dtype=torch.float32)
        position = 0
        for working, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            master = self._master_of[working]
            part = flat[position : position + gradient.numel()].view(gradient.shape)
            position += gradient.numel()
            part.copy_(gradient)
            if master.grad is not None:
                part.add_(master.grad)
            master.grad = part
        # What is left behind in the bf16 gradients must not be added to again.
        bucket.buffer().zero_()
        flat.div_(dist.get_world_size())
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: bucket.buffer())

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def sync_buffers(self) -> None:
        average_buffers(self.module)


class ZeroOneTrained(DdpTrained):
    """DDP with the optimizer's states shared out, each parameter's to one rank (ZeRO stage 1).

    The masters of `master_shards` are those that this rank moves, so what follows them (EMA) is shared out as well.
    """

    def _make_optimizer(self, optim: OptimSettings) -> torch.optim.Optimizer:
        optimizer = ZeroRedundancyOptimizer(
            self._parameters,
            optimizer_class=torch.optim.AdamW,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._local: torch.optim.Optimizer = optimizer.optim
        own = [p for group in self._local.param_groups for p in group["params"]]
        adamw.make_states(self._local, own)
        held = {id(p) for p in own}
        self._held = [id(m.tensor) in held for m in self._masters]
        owners = torch.tensor([dist.get_rank() * held_here for held_here in self._held], device=self.device)
        dist.all_reduce(owners)  # one rank's number each, from that rank
        self._owners: list[int] = owners.tolist()
        return optimizer

    def _step(self, lr: float, skipped: torch.Tensor) -> None:
        self._local.found_inf = skipped  # type: ignore[attr-defined]
        self.set_lr(lr)
        self._optimizer.step()

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)  # the wrapper's group, which it copies to its own optimizer at a step
        for group in self._local.param_groups:
            group["lr"] = lr

    def param_groups(self) -> list[dict[str, Any]]:
        return plain_groups(self._local, len(self._masters))

    def masters_changed(self) -> None:
        """Each rank has changed the masters that it moves: the others get them."""
        works = [
            dist.broadcast(m.tensor.detach(), owner, async_op=True)
            for m, owner in zip(self._masters, self._owners, strict=True)
        ]
        for work in works:
            if work is not None:
                work.wait()
        super().masters_changed()

    def master_shards(self) -> list[TensorShard]:
        return [
            m.shard() if held else TensorShard(m.key, m.shape, 0, m.tensor.new_empty(0))
            for m, held in zip(self._masters, self._held, strict=True)
        ]

    def optimizer_shards(self) -> list[TensorShard]:
        return [
            shard
            for i, (master, held) in enumerate(zip(self._masters, self._held, strict=True))
            for shard in adamw.state_shards(self._local, i, master, held=held)
        ]
