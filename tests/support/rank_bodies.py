"""What the ranks of `support.distributed` do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.dc_ae import light_config, lively
from support.mmdit import inputs_for, small_config, small_model
from torch import Tensor, nn

from osora_cli.checkpoint.comm import SINGLE, Comm
from osora_cli.checkpoint.comm_dist import DistComm
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.store import CheckpointStore, SaveError
from osora_cli.engine.base import OptimSettings, Trained
from osora_cli.engine.launch import save_group
from osora_cli.engine.native import NativeEngine
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.settings import PluginSettings
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.discriminator import BatchNorm3dFp32
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.state import Progress

OPTIM = OptimSettings(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
GLOBAL_BATCH = 6


def network(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "mmdit":
        return small_model()
    if kind == "mmdit-four-heads":  # computed again in the backward pass, with condition and guidance
        model = small_model(num_heads=4, axes_dim=[4, 4, 4], cond_embed=True, guidance_embed=True)
        model.enable_grad_checkpoint()
        return model
    model = lively(DcAe(light_config(time=2, space=4)))
    return model


def clip(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, 3, 4, 16, 16, generator=generator) * 2 - 1


def loss_of(kind: str, trained: Trained, samples: list[int]) -> Tensor:
    """Mean loss over samples, each drawn from its number."""
    if kind.startswith("mmdit"):
        more = {"cond_embed": True, "guidance_embed": True} if kind == "mmdit-four-heads" else {}
        parts = []
        for number in samples:
            inputs = inputs_for(small_config(**more), batch=1, seed=10 * number)
            parts.append((trained.module(**inputs).float() - inputs["img"]).square().mean())
        return torch.stack(parts).mean()
    video = torch.cat([clip(number) for number in samples])
    reconstruction, _, _ = trained.module(video.to(trained.compute_dtype))
    return (reconstruction.float() - video).abs().mean()


def alike(ranks: Ranks, kind: str, plugin: str, dtype: str, updates: int, stage: int) -> Any:
    """Ranks that share each sample's tokens: all see all samples. Losses, norms and the first moment."""
    ranks = replace(ranks, sequence=ranks.world_size)
    trained = prepare(ranks, kind, plugin, dtype, zero_stage=stage, sp_size=ranks.world_size)
    losses, norms, first = [], [], []
    for update in range(updates):
        samples = [update * 2, update * 2 + 1]
        loss = loss_of(kind, trained, samples)
        trained.backward(loss)
        norms.append(float(trained.update(1e-3, 0.05).grad_norm))
        losses.append(float(loss.detach()))
        first = first or first_gradient(trained)
    return {"losses": losses, "norms": norms, "moment": first}


def prepare(ranks: Ranks, kind: str, plugin: str, dtype: str = "fp32", **settings: Any) -> Trained:
    engine = NativeEngine(torch.device("cpu"), dtype, plugin, ranks=ranks, settings=PluginSettings(**settings))
    return engine.prepare(network(kind), OPTIM)


def train(
    ranks: Ranks, kind: str, plugin: str, dtype: str, updates: int, batch: int = GLOBAL_BATCH, **settings: Any
) -> dict[str, Any]:
    """Losses, gradient norms and the weights in the end; the global batch is shared out over ranks."""
    trained = prepare(ranks, kind, plugin, dtype, **settings)
    share = batch // ranks.world_size
    losses, norms = [], []
    for update in range(updates):
        first = update * batch + ranks.rank * share
        loss = loss_of(kind, trained, list(range(first, first + share)))
        trained.backward(loss)
        result = trained.update(1e-3, 0.05)
        losses.append(float(ranks.mean(loss.detach())))
        norms.append(float(result.grad_norm))
    return {"losses": losses, "norms": norms, "model": pieces(trained.model_shards())}


def pieces(shards: Any) -> list[tuple[str, int, Tensor]]:
    return [(s.key, s.start, s.tensor.detach().reshape(-1).clone()) for s in shards]


def first_gradient(trained: Trained) -> list[tuple[str, int, Tensor]]:
    """The first moment: after one update it is a tenth of the clipped gradient or so, the same share everywhere."""
    return pieces(s for s in trained.optimizer_shards() if s.key.endswith("exp_avg"))


def one_update(ranks: Ranks, kind: str, plugin: str, dtype: str, accumulation: int, **settings: Any) -> Any:
    trained = prepare(ranks, kind, plugin, dtype, **settings)
    share = GLOBAL_BATCH // ranks.world_size // accumulation
    for micro in range(accumulation):
        first = (ranks.rank * accumulation + micro) * share
        with nullcontext() if micro + 1 == accumulation else trained.no_sync():
            trained.backward(loss_of(kind, trained, list(range(first, first + share))) / accumulation)
    result = trained.update(1e-3, 1e9)
    return {"norm": float(result.grad_norm), "moment": first_gradient(trained)}


class Awkward(nn.Module):
    """Sizes that do not divide, tensors smaller than the ranks, buffers of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = BatchNorm3dFp32(5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.arange(7.0), requires_grad=False)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        x = self.norm(x[..., None, None, None])[..., 0, 0, 0]
        for block in self.blocks:
            x = torch.nn.functional.silu(block(x))
        return self.last(x * self.scale) + self.frozen.sum() * 0


def run_state(ranks: Ranks, plugin: str, dtype: str, seed: int, updates: int) -> RunState:
    """An `Awkward` network that has done some updates, with EMA, as a run holds it."""
    torch.manual_seed(seed)
    engine = NativeEngine(torch.device("cpu"), dtype, plugin if ranks.world_size > 1 else "none", ranks=ranks)
    trained = engine.prepare(Awkward(), OPTIM)
    ema = Ema(trained.master_shards(), 0.5)
    for update in range(updates):
        generator = torch.Generator().manual_seed(100 * update + ranks.rank)
        batch = torch.randn(4, 3, generator=generator)
        trained.backward(trained.module(batch).float().square().mean())
        ema.update(trained.update(1e-2, 1.0).skipped)
    return RunState(_Task(trained), ema, True)  # type: ignore[arg-type]


class _Task:
    """As much of a task as a save needs."""

    def __init__(self, trained: Trained) -> None:
        self.networks = {"model": trained}

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        return {"lr_scheduler": {"last_epoch": update}}


def groups_of(state: RunState) -> dict[str, list[tuple[str, int, Tensor]]]:
    contents = state.contents(Progress(0, 3, 3, 3), {"epoch": 0}, 4, {})
    return {group: pieces(shards) for group, shards in contents.sharded.items()}


def save(ranks: Ranks, folder: str, plugin: str, dtype: str) -> dict[str, Any]:
    """Train a little and save; gives what this rank holds of each group."""
    state = run_state(ranks, plugin, dtype, seed=1, updates=3)
    held = groups_of(state)
    _write(ranks, folder, state)
    return held


def save_drifted(ranks: Ranks, folder: str, plugin: str) -> str:
    """Save what differs in one value of one weight on the last rank; gives what is said of it."""
    state = run_state(ranks, plugin, "fp32", seed=1, updates=1)
    if ranks.rank == ranks.world_size - 1:
        (trained,) = state.task.networks.values()
        shard = max(trained.model_shards(), key=lambda s: s.tensor.numel())
        with torch.no_grad():
            shard.tensor.view(-1)[-1] += 1.0
    try:
        _write(ranks, folder, state)
    except SaveError as error:
        return error.message
    return "saved"


def load(ranks: Ranks, source: str, plugin: str, dtype: str, save_to: str | None = None) -> dict[str, Any]:
    """Load into a network of other weights; gives what this rank holds then. Saves it again, without a step."""
    state = run_state(ranks, plugin, dtype, seed=2, updates=1)
    state.load(CheckpointReader(source), ranks, 7)
    held = groups_of(state)
    if save_to is not None:
        _write(ranks, save_to, state)
    return held


def _write(ranks: Ranks, folder: str, state: RunState) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    comm: Comm = SINGLE if ranks.world_size == 1 else DistComm(save_group(ranks))
    store = CheckpointStore(Path(folder), async_io=True, comm=comm)
    try:
        store.save(state.contents(Progress(0, 3, 3, 3), {"epoch": 0}, 4, {}))
        store.finish()
    finally:
        store.close()


def peak_of_save(ranks: Ranks, folder: str, megabytes: int) -> dict[str, int]:
    """Highest resident memory before and during a save of a state of that size, sharded; bytes."""
    rows = megabytes * 2**20 // 16 // 256
    module = nn.Sequential(nn.Linear(256, rows, bias=False))
    engine = NativeEngine(torch.device("cpu"), "fp32", "zero2" if ranks.world_size > 1 else "none", ranks=ranks)
    trained = engine.prepare(module, OPTIM)
    del module
    state = RunState(_Task(trained), Ema(trained.master_shards(), 0.5), True)  # type: ignore[arg-type]
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    Path(folder).mkdir(parents=True, exist_ok=True)
    comm: Comm = SINGLE if ranks.world_size == 1 else DistComm(save_group(ranks))
    store = CheckpointStore(Path(folder), async_io=True, comm=comm, buffer_bytes=4 << 20)
    store.save(state.contents(Progress(0, 1, 1, 1), {"epoch": 0}, 4, {}))
    store.finish()
    store.close()
    return {"before": before, "peak": _resident("VmHWM")}


def _resident(what: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)
