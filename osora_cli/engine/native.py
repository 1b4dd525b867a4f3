"""The native engine: torch's own parts only, on the CPU or one GPU.

fp32 parameters are the masters. With bf16 compute the module's own parameters are a bf16 working copy: each
gradient is added to its master's fp32 gradient as soon as it is complete and then freed, so accumulation over
micro-batches is in fp32 and working weights are bf16(master), bit for bit.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from osora_cli.engine.base import OptimSettings, Trained, UpdateResult, named_trainable
from osora_cli.errors import ConfigError, SetupError
from osora_cli.tensors import DTYPES, TensorShard, plain_key

_STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


class NativeTrained:
    """A network on one device with its fused AdamW."""

    def __init__(
        self, module: nn.Module, optim: OptimSettings, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        self.compute_dtype = compute_dtype
        self.is_own_master = compute_dtype is torch.float32
        module = module.to(device)
        trainable = list(named_trainable(module))
        self._names = [plain_key(name) for name, _ in trainable]
        if self.is_own_master:
            self.module = module
            self._masters = [p for _, p in trainable]
            self._working: list[nn.Parameter] | None = None
        else:
            self._masters = [nn.Parameter(p.detach().clone()) for _, p in trainable]
            self.module = module.to(compute_dtype)
            self._working = [p for _, p in named_trainable(self.module)]
            for working, master in zip(self._working, self._masters, strict=True):
                _move_gradients(working, master)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        self._make_state()

    def _make_state(self) -> None:
        # Made at once rather than at the first step: a save at any time is whole, and a load has somewhere to go.
        for p in self._masters:
            self._optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        gradients = [p.grad for p in self._masters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._masters, max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The fused kernel leaves everything as it is when found_inf is 1: the decision stays on the device.
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.masters_changed()
        return UpdateResult(norm, skipped)

    @torch.no_grad()
    def masters_changed(self) -> None:
        if self._working is not None:
            torch._foreach_copy_(list[torch.Tensor](self._working), list[torch.Tensor](self._masters))

    def model_shards(self) -> list[TensorShard]:
        return [TensorShard.whole(plain_key(k), t.detach()) for k, t in self.module.state_dict().items()]

    def master_shards(self) -> list[TensorShard]:
        return [TensorShard.whole(k, p.detach()) for k, p in zip(self._names, self._masters, strict=True)]

    def optimizer_shards(self) -> list[TensorShard]:
        return [
            TensorShard.whole(f"state.{i}.{name}", self._optimizer.state[p][name])
            for i, p in enumerate(self._masters)
            for name in _STATE_NAMES
        ]

    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.state_dict()["param_groups"]
        return groups


def _move_gradients(working: nn.Parameter, master: nn.Parameter) -> None:
    """Add each finished gradient of `working` to `master.grad` in fp32 and free it."""

    def move(p: torch.Tensor) -> None:
        if p.grad is None:
            return
        if master.grad is None:
            master.grad = p.grad.to(master.dtype)
        else:
            master.grad.add_(p.grad)
        p.grad = None

    working.register_post_accumulate_grad_hook(move)


class NativeEngine:
    """One process on one device."""

    name = "native"
    rank = 0
    world_size = 1

    def __init__(self, device: torch.device, dtype: str, plugin: str, *, deterministic: bool = False) -> None:
        self.device = device
        self.plugin = plugin
        self._compute_dtype = DTYPES[dtype]
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = not deterministic
            if deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)

    def prepare(self, module: nn.Module, optim: OptimSettings) -> Trained:
        return NativeTrained(module, optim, self.device, self._compute_dtype)

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values


def pick_device(wanted: str = "auto") -> torch.device:
    """`auto`: the first GPU if there is one, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "`device: cuda` was asked for and torch sees no GPU",
            hint="use `--device cpu`, or install a CUDA build of torch",
        )
    return torch.device("cuda", 0) if wanted == "cuda" else torch.device("cpu")


def make_engine(*, engine: str, plugin: str, dtype: str, device: str, deterministic: bool) -> NativeEngine:
    """The engine that a config asks for. `auto` is native: it is the only one that runs one process on one device.

    Raises:
        ConfigError: no engine of that name.
        SetupError: no such device, or a launcher has started several processes, each of which would train alone.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise SetupError(
            f"this version trains in one process, and the launcher started {ranks}",
            where="WORLD_SIZE in the environment",
            hint="start it without torchrun: `osora train ...`",
        )
    if engine not in ("auto", "native"):
        raise ConfigError(f"engine `{engine}` is not known", allowed="auto, native")
    return NativeEngine(pick_device(device), dtype, plugin, deterministic=deterministic)
