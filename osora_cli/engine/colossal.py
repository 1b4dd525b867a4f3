"""`engine: colossalai`: ZeRO through ColossalAI's Booster (LowLevelZeroPlugin with HybridAdam) on CUDA, and its DDP.

Written against colossalai 0.5.0. Its ZeRO cuts every parameter, flat and padded, into one equal piece a rank: fp32
masters and moments of a rank are therefore ranges of elements, which is all that checkpoints ask for. What it does
not do itself is done here: passing over non-finite gradients, states that exist before the first step, whole numbers
of steps as tensors. This file alone imports colossalai.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from osora_cli.engine.base import OptimSettings, Trained, UpdateResult, named_trainable
from osora_cli.engine.buffers import average_buffers
from osora_cli.engine.colossal_install import check_colossal
from osora_cli.engine.cuda import begin_on
from osora_cli.engine.ddp import Ddp, DdpTrained
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.settings import MILLION, PluginSettings, sharing
from osora_cli.engine.single import plain_groups
from osora_cli.errors import ConfigError, SetupError
from osora_cli.tensors import DTYPES, TensorShard, plain_key

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ColossalEngine:
    """This process's part of a training through ColossalAI.

    Args:
        device: where this rank computes; ZeRO needs CUDA.
        dtype, plugin, deterministic, ranks, settings: as of `NativeEngine`.

    Raises:
        SetupError: colossalai is not installed, does not load, or has no GPU for ZeRO.
        ConfigError: a plugin that it does not have.
    """

    name = "colossalai"

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        plugin: str,
        *,
        deterministic: bool,
        ranks: Ranks,
        settings: PluginSettings,
    ) -> None:
        check_colossal(sharing(plugin, settings), settings, device.type)
        self.device = device
        self.plugin = plugin
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.notes: list[str] = []
        self._settings = settings
        self._compute_dtype = DTYPES[dtype]
        begin_on(device, deterministic=deterministic)
        if not dist.is_initialized():  # it works on a process group even where there is one process
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        _load()

    def prepare(self, module: nn.Module, optim: OptimSettings) -> Trained:
        if self.ranks.sequence > 1:
            from osora_cli.engine.sequence import split_tokens

            split_tokens(module, self.device, self.ranks.sequence)
        shared = sharing(self.plugin, self._settings)
        if shared == "ddp":
            return ColossalDdp(module, optim, self.device, self._compute_dtype, self._settings.bucket_mib)
        stage = 2 if shared == "zero2" else 1
        return ColossalZero(module, optim, self.device, self._compute_dtype, stage, self._settings)

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.mean(values)


def fault_here() -> str | None:
    """Why ColossalAI's ZeRO cannot train here although it is installed; None: it can.

    It does not load, or its optimizer has no kernel; that is built here if it never was.
    """
    try:
        _load()
        _make_adam(
            [nn.Parameter(torch.zeros(1))], OptimSettings(lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        )
    except SetupError as error:
        return error.message
    return None


def _load() -> None:
    """Import it once, quietly: it warns of its dependencies, not of itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import colossalai.booster  # noqa: F401
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise SetupError(
            f"colossalai does not load: {type(error).__name__}: {first}",
            hint="`pip install 'osora[colossalai]'` brings what it needs; or use `--engine native`",
        ) from error


class ColossalZero:
    """A network under LowLevelZeroPlugin.

    Args:
        stage: 1 shards the optimizer, 2 the gradients as well.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimSettings,
        device: torch.device,
        compute_dtype: torch.dtype,
        stage: int,
        settings: PluginSettings,
    ) -> None:
        from colossalai.booster import Booster
        from colossalai.booster.plugin import LowLevelZeroPlugin

        self.compute_dtype = compute_dtype
        # Its masters are copies in fp32 compute, too, but of the same bits as the weights.
        self.is_own_master = compute_dtype is torch.float32
        self.device = device
        self._stage = stage
        plugin = LowLevelZeroPlugin(
            stage=stage,
            precision=_PRECISIONS[compute_dtype],
            reduce_bucket_size_in_m=max(1, settings.bucket_elements // MILLION),
            communication_dtype=torch.float32,
            overlap_allgather=settings.overlap_allgather,
            cpu_offload=settings.cpu_offload,
            master_weights=True,
            cast_inputs=False,  # the networks cast what they are given themselves
        )
        for p in module.parameters():
            p.data = p.data.contiguous()
        module = module.to(device)
        masters = self._masters_before_rounding(module)
        adam = _make_adam([p for _, p in named_trainable(module)], optim)
        boosted, self._zero, *_ = Booster(plugin=plugin).boost(module, adam)
        adam.norm = lambda: self._zero._current_grad_norm
        self.module = boosted.unwrap()
        self._boosted = boosted
        if settings.overlap_allgather:
            self._wait_in_forward()
        self._parts = self._cut()
        self._fill_masters(masters)
        self._make_states()

    @staticmethod
    def _masters_before_rounding(module: nn.Module) -> list[torch.Tensor]:
        """The plugin casts the network first and makes its fp32 masters from that: they would begin rounded."""
        return [p.detach().clone() for _, p in named_trainable(module)]

    def _cut(self) -> list[tuple[str, nn.Parameter, torch.Tensor, int, int]]:
        """(key, working parameter, this rank's flat master, first element, elements that are not padding)."""
        masters = self._zero.get_working_to_master_map()
        rank = dist.get_rank()
        parts = []
        for name, p in named_trainable(self.module):
            master = masters[id(p)]
            start = min(p.numel(), rank * master.numel())
            parts.append((plain_key(name), p, master, start, min(master.numel(), p.numel() - start)))
        return parts

    @torch.no_grad()
    def _fill_masters(self, whole: list[torch.Tensor]) -> None:
        for (_, _, master, start, count), tensor in zip(self._parts, whole, strict=True):
            master[:count].copy_(tensor.reshape(-1)[start : start + count])

    def _make_states(self) -> None:
        self._steps = [torch.zeros((), dtype=torch.float32) for _ in self._parts]
        for _, _, master, _, _ in self._parts:
            self._zero.optim.state[master] = {
                "step": 0,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def _wait_in_forward(self) -> None:
        """Parameters are still being gathered when the next forward begins: its operators wait for their own."""
        contexts: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            contexts.append(self._boosted._hook_context())
            contexts[-1].__enter__()

        def leave(*_: Any) -> None:
            contexts.pop().__exit__(None, None, None)

        self.module.register_forward_pre_hook(enter)
        self.module.register_forward_hook(leave, always_call=True)

    def backward(self, loss: torch.Tensor) -> None:
        self._zero.backward(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Stage 2 reduces each micro-batch: it keeps no whole gradients to add to."""
        return self._zero.no_sync() if self._stage == 1 else nullcontext()

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        self.set_lr(lr)
        zero = self._zero
        zero._clip_grad_norm = max_norm
        states = [zero.optim.state[master] for _, _, master, _, _ in self._parts]
        for state, step in zip(states, self._steps, strict=True):
            state["step"] = int(step)
        zero.step()
        for state, step in zip(states, self._steps, strict=True):
            step.fill_(state["step"])
        norm = float(zero._current_grad_norm)
        zero.zero_grad()
        values = torch.tensor([norm, float(not math.isfinite(norm))], device=self.device)
        return UpdateResult(values[0], values[1])

    def set_lr(self, lr: float) -> None:
        for group in self._zero.optim.param_groups:
            group["lr"] = lr

    def sync_buffers(self) -> None:
        average_buffers(self.module)

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Gather the working weights anew from the masters' pieces."""
        for _, p, master, _, _ in self._parts:
            padded = self._zero._working_param_to_padded_working_param[p]
            dist.all_gather_into_tensor(padded, master.to(device=padded.device, dtype=padded.dtype))

    def model_shards(self) -> list[TensorShard]:
        self._zero._force_wait_all_gather()
        return [TensorShard.whole(plain_key(k), t.detach()) for k, t in self.module.state_dict().items()]

    def master_shards(self) -> list[TensorShard]:
        return [TensorShard(key, tuple(p.shape), start, m[:count]) for key, p, m, start, count in self._parts]

    def optimizer_shards(self) -> list[TensorShard]:
        shards = []
        for i, ((_, p, master, start, count), step) in enumerate(zip(self._parts, self._steps, strict=True)):
            state = self._zero.optim.state[master]
            shards.append(TensorShard(f"state.{i}.step", (), 0, step if count else step.new_empty(0)))
            shards += [TensorShard(f"state.{i}.{n}", tuple(p.shape), start, state[n][:count]) for n in _MOMENTS]
        return shards

    def param_groups(self) -> list[dict[str, Any]]:
        return plain_groups(self._zero.optim, len(self._parts))


def _make_adam(params: list[nn.Parameter], optim: OptimSettings) -> Any:
    """HybridAdam that leaves everything as it is when the gradient is not finite.

    Raises:
        SetupError: its kernels cannot be built.
    """
    try:
        from colossalai.nn.optimizer import HybridAdam

        class SteadyAdam(HybridAdam):  # type: ignore[misc]
            def step(self, closure: Any = None, div_scale: float = -1) -> Any:
                return super().step(closure, div_scale) if math.isfinite(self.norm()) else None

        return SteadyAdam(
            params, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, adamw_mode=True
        )
    except (RuntimeError, ImportError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise SetupError(
            f"colossalai's HybridAdam has no kernel here: {first}",
            hint="it is built at the first use: a CUDA toolkit of torch's version (`nvcc --version`), a C++ compiler "
            "and ninja; or use `--engine native`",
        ) from error


class ColossalDdp(DdpTrained):
    """DDP through the Booster: the same optimizer, hooks and shards as the native engine's."""

    def _wrap(self, module: nn.Module, options: dict[str, Any]) -> Ddp:
        from colossalai.booster import Booster
        from colossalai.booster.plugin import TorchDDPPlugin

        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            raise ConfigError(
                "colossalai's DDP turns batch norms into synchronised ones, and this network's keep to their rank",
                where="engine",
                allowed="native with ddp, or colossalai with zero1, zero2",
            )
        known = {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"}
        plugin = TorchDDPPlugin(
            broadcast_buffers=False, **{name: value for name, value in options.items() if name in known}
        )
        with _quiet():
            boosted, *_ = Booster(plugin=plugin).boost(module)
        wrapped = boosted.module
        wrapped.__class__ = Ddp  # to stand aside where a network is frozen
        return wrapped


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
