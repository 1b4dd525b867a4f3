"""The native engine: torch's own parts only, on the CPU or GPUs, in one process or many.

`plugin` says how ranks share the state: `none` and `ddp` keep all of it on each rank, `zero1` shards the optimizer,
`zero2` and `zero3` shard parameters, gradients and optimizer (FSDP2). One process has nothing to share, whatever the
plugin. fp32 parameters are the masters, compute is in `dtype`, gradients are reduced over ranks in fp32.
"""

from __future__ import annotations

import torch
from torch import nn

from osora_cli.engine.base import Engine, OptimSettings, Trained
from osora_cli.engine.colossal_install import check_colossal, is_installed
from osora_cli.engine.cuda import begin_on
from osora_cli.engine.ranks import SINGLE_RANK, Ranks
from osora_cli.engine.settings import PluginSettings, check_plugin, sharing
from osora_cli.engine.single import NativeTrained
from osora_cli.errors import ConfigError, SetupError
from osora_cli.tensors import DTYPES

__all__ = ["NativeEngine", "NativeTrained", "make_engine", "pick_device"]


class NativeEngine:
    """This process's part of a training on torch's own means.

    Args:
        device: where this rank computes.
        dtype: of the computation, a name of `tensors.DTYPES`.
        plugin: how ranks share the state.
        deterministic: deterministic kernels on CUDA.
        ranks: all processes of the run.
        settings: of the plugin.

    Raises:
        ConfigError: the plugin cannot be set up so over these ranks.
    """

    name = "native"

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        plugin: str,
        *,
        deterministic: bool = False,
        ranks: Ranks = SINGLE_RANK,
        settings: PluginSettings | None = None,
    ) -> None:
        self.device = device
        self.plugin = plugin
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._settings = settings or PluginSettings()
        self._compute_dtype = DTYPES[dtype]
        check_plugin(plugin, self._settings, ranks.world_size)
        self.notes: list[str] = []
        self._sharing = self._sharing_here(sharing(plugin, self._settings))
        begin_on(device, deterministic=deterministic)

    def _sharing_here(self, wanted: str) -> str:
        """How the state is shared out; `wanted`, where this torch can do it on this device."""
        sharded = wanted in ("zero2", "zero3") and self.world_size > 1
        if not sharded or self.device.type != "cpu" or hasattr(torch.cpu.Stream, "record_event"):
            return wanted
        lacking = f"FSDP2 of torch {torch.__version__} does not run on the CPU"
        if self._settings.replicate > 1:
            raise SetupError(f"{lacking}", where="plugin_config.replicate", hint="pip install --upgrade torch")
        self.notes.append(f"plugin {wanted}: {lacking}, zero1 is used")
        return "zero1"

    def prepare(self, module: nn.Module, optim: OptimSettings) -> Trained:
        if self.world_size == 1:
            return NativeTrained(module, optim, self.device, self._compute_dtype)
        if self.ranks.sequence > 1:
            from osora_cli.engine.sequence import split_tokens

            split_tokens(module, self.device, self.ranks.sequence)
        shared = self._sharing
        if shared in ("zero2", "zero3"):
            from osora_cli.engine.fsdp import FsdpTrained

            return FsdpTrained(
                module,
                optim,
                self.device,
                self._compute_dtype,
                reshard_after_forward=shared == "zero3",
                replicate=self._settings.replicate,
                cpu_offload=self._settings.cpu_offload,
            )
        from osora_cli.engine.ddp import DdpTrained, ZeroOneTrained

        kind = ZeroOneTrained if shared == "zero1" else DdpTrained
        return kind(module, optim, self.device, self._compute_dtype, self._settings.bucket_mib)

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.mean(values)


def pick_device(wanted: str = "auto", local_rank: int = 0) -> torch.device:
    """This rank's device. `auto`: its GPU if the machine has any, else the CPU.

    Raises:
        SetupError: CUDA was asked for and is not there, or there are more ranks on this machine than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError(
            "`device: cuda` was asked for and torch sees no GPU",
            hint="use `--device cpu`, or install a CUDA build of torch",
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SetupError(
            f"rank {local_rank} of this machine has no GPU: there are {count}",
            hint=f"start at most {count} processes a machine (`--nproc {count}`), or use `--device cpu`",
        )
    return torch.device("cuda", local_rank)


def make_engine(
    *,
    engine: str,
    plugin: str,
    dtype: str,
    device: str | torch.device,
    deterministic: bool,
    ranks: Ranks = SINGLE_RANK,
    settings: PluginSettings | None = None,
) -> Engine:
    """The engine that a config asks for. `auto`: colossalai where it is installed and can run the plugin by ZeRO on a
    GPU, else native; one that is installed and does not work is noted.

    Args:
        device: this rank's device, or `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: no engine of that name, or a plugin that cannot be.
        SetupError: no such device, or colossalai is not there.
    """
    if engine not in ("auto", "native", "colossalai"):
        raise ConfigError(f"engine `{engine}` is not known", allowed="auto, native, colossalai")
    place = pick_device(device, ranks.local_rank) if isinstance(device, str) else device
    settings = settings or PluginSettings()
    shared = sharing(plugin, settings)
    fits = shared in ("zero1", "zero2") and settings.replicate == 1 and place.type == "cuda"
    notes: list[str] = []
    if engine == "colossalai" or (engine == "auto" and fits and is_installed()):
        check_colossal(shared, settings, place.type)
        from osora_cli.engine.colossal import ColossalEngine, fault_here

        fault = fault_here() if engine == "auto" else None
        # One rank's fault is all ranks' fault: they take the same engine.
        if not any(ranks.gather_numbers([int(fault is not None)])):
            return ColossalEngine(place, dtype, plugin, deterministic=deterministic, ranks=ranks, settings=settings)
        notes.append(f"engine native in place of colossalai: {fault or 'another rank cannot use it'}")
    made = NativeEngine(place, dtype, plugin, deterministic=deterministic, ranks=ranks, settings=settings)
    made.notes += notes
    return made
