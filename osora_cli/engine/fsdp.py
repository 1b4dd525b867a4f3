"""`plugin: zero2` and `zero3`: parameters, gradients and optimizer sharded over ranks by FSDP2.

zero2 keeps the parameters gathered between forward and backward, zero3 gathers them twice. A second mesh dimension
replicates: shards inside a node, copies between nodes. Parameters are fp32 shards of whole rows; they are gathered in
the computation's dtype, and gradients are reduced and accumulated in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from osora_cli.engine import adamw
from osora_cli.engine.adamw import Master
from osora_cli.engine.base import OptimSettings, UpdateResult, named_trainable
from osora_cli.engine.buffers import average_buffers
from osora_cli.engine.single import plain_groups
from osora_cli.tensors import TensorShard, plain_key

_LEAST_SHARE = 1000

# It warns of in-place operations on what a block returns. The networks have none: results equal one process's.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


class FsdpTrained:
    """A network whose parameters each rank holds some rows of.

    The optimizer works on the plain local tensors behind FSDP2's parameters, so that its fused kernel can pass over
    non-finite gradients on the device.

    Args:
        reshard_after_forward: let the gathered parameters go after the forward (zero3).
        replicate: groups of ranks with the whole state each.
        cpu_offload: parameters and optimizer live in the host's memory.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimSettings,
        device: torch.device,
        compute_dtype: torch.dtype,
        *,
        reshard_after_forward: bool,
        replicate: int = 1,
        cpu_offload: bool = False,
    ) -> None:
        self.compute_dtype = compute_dtype
        self.is_own_master = compute_dtype is torch.float32
        self.device = device
        self._keys = list(module.state_dict().keys())
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        mesh = make_mesh(device, replicate)
        self._shard_group = mesh.get_group("shard")
        shard_rank, shards = mesh.get_local_rank("shard"), mesh["shard"].size()
        self.module = module
        self._shard(module, mesh, reshard_after_forward, cpu_offload)
        self._settle()
        self._sharded: dict[str, DTensor] = {}
        self._all: dict[str, Master] = {}
        for name, p in module.named_parameters():
            assert isinstance(p, DTensor), f"`{name}` was not sharded"
            self._sharded[name] = p
            local = nn.Parameter(p.to_local().detach())
            self._all[name] = Master(plain_key(name), shapes[name], _start(shapes[name], shard_rank, shards), local)
        self._names = [name for name, _ in named_trainable(module)]
        self._held = [self._all[name].tensor for name in self._names if self._all[name].tensor.numel()]
        self._optimizer = adamw.make_adamw(self._held, optim)

    def _shard(self, module: nn.Module, mesh: DeviceMesh, reshard: bool, cpu_offload: bool) -> None:
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if cpu_offload else OffloadPolicy()
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
        # The networks cast what they are given themselves: what must stay fp32 (time, positions) is theirs to know.
        root = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # The backward begins with the root's parameters: to let them go after the forward would only gather them again.
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=root, offload_policy=offload)

    def _settle(self) -> None:
        """Gather and let go once: torch 2.6 moves unevenly sharded parameters to their lasting place at that point."""
        for part in self._units():
            part.unshard()
            part.reshard()

    def _units(self) -> Iterator[FSDPModule]:
        return (part for part in self.module.modules() if isinstance(part, FSDPModule))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        gradients = self._take_gradients()
        norm = self._norm(gradients)
        skipped = adamw.clip(self._held, norm, max_norm) if self._held else _not_finite(norm)
        adamw.step(self._optimizer, lr, skipped)
        for p in self._held:
            p.grad = None
        return adamw.updated(norm, skipped, self.device)

    def _take_gradients(self) -> list[torch.Tensor]:
        """Each parameter's reduced gradient moves to the local tensor that the optimizer knows."""
        taken = []
        for name in self._names:
            sharded, master = self._sharded[name], self._all[name]
            gradient, sharded.grad = sharded.grad, None
            if gradient is None or not master.tensor.numel():
                continue
            assert isinstance(gradient, DTensor)
            master.tensor.grad = gradient.to_local()
            taken.append(master.tensor.grad)
        return taken

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """L2 norm of the whole gradient: the same bits on every rank of a group, and so the same decisions."""
        local = adamw.global_norm(gradients, self.device)
        squares = local.to(self.device).square()
        dist.all_reduce(squares, group=self._shard_group)
        return squares.sqrt().to(local.device)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def masters_changed(self) -> None:
        for part in self._units():
            part.reshard()

    def sync_buffers(self) -> None:
        average_buffers(self.module)

    def model_shards(self) -> list[TensorShard]:
        """Weights as the computation sees them: in bf16 they are made for this call."""
        buffers = dict(self.module.named_buffers())
        out = []
        for key in self._keys:
            if key in buffers:
                out.append(TensorShard.whole(plain_key(key), buffers[key].detach()))
                continue
            master = self._all[key].shard()
            tensor = master.tensor if self.is_own_master else master.tensor.to(self.compute_dtype)
            out.append(TensorShard(master.key, master.shape, master.start, tensor))
        return out

    def master_shards(self) -> list[TensorShard]:
        return [self._all[name].shard() for name in self._names]

    def optimizer_shards(self) -> list[TensorShard]:
        return [
            shard
            for i, name in enumerate(self._names)
            for shard in adamw.state_shards(self._optimizer, i, self._all[name])
        ]

    def param_groups(self) -> list[dict[str, Any]]:
        return plain_groups(self._optimizer, len(self._names))


def make_mesh(device: torch.device, replicate: int) -> DeviceMesh:
    """All ranks, as `replicate` groups of neighbours that shard."""
    world = dist.get_world_size()
    if replicate == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: the entries of the network's outermost lists of blocks (its stages).

    Not those that are next to nothing: they come with the network itself, as does all that is in no list.
    """
    found: list[nn.Module] = []
    least = _size(module) / _LEAST_SHARE

    def search(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(child, nn.ModuleList):
                found.extend(entry for entry in child if _size(entry) > least)
            else:
                search(child)

    search(module)
    return found


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _start(shape: tuple[int, ...], rank: int, ranks: int) -> int:
    """First element of a rank's rows: FSDP2 shards dimension 0 in chunks of ceil(rows / ranks)."""
    rows = shape[0]
    row = 1
    for size in shape[1:]:
        row *= size
    return min(rows, rank * -(-rows // ranks)) * row


def _not_finite(norm: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(norm)).to(torch.float32)
