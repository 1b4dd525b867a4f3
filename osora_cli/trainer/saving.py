"""What goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.engine.base import Trained
from osora_cli.tensors import TensorShard
from osora_cli.trainer import rng
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.state import Progress
from osora_cli.trainer.task import TrainTask

# Group names of each network's parts in a checkpoint.
_OPTIMIZER = {"model": "optimizer", "discriminator": "disc_optimizer"}
_MASTER = {"model": "master", "discriminator": "disc_master"}


@dataclass
class RunState:
    """Everything that a run must find again when it goes on."""

    task: TrainTask
    ema: Ema | None
    save_masters: bool
    fresh: frozenset[str] = frozenset()
    """Networks that a load leaves as they are, whatever the checkpoint holds."""

    def contents(
        self, progress: Progress, sampler: dict[str, Any], batch_size: int | None, provenance: dict[str, Any]
    ) -> CheckpointContents:
        """The state at an update boundary; tensors are live, the store copies them."""
        sharded: dict[str, list[TensorShard]] = {}
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, network in self.task.networks.items():
            sharded[name] = network.model_shards()
            sharded[_OPTIMIZER[name]] = network.optimizer_shards()
            groups[_OPTIMIZER[name]] = network.param_groups()
            if self.save_masters and not network.is_own_master:
                sharded[_MASTER[name]] = network.master_shards()
        if self.ema is not None:
            sharded["ema"] = self.ema.shards()
        return CheckpointContents(
            counters=progress.counters(batch_size),
            sharded=sharded,
            param_groups=groups,
            small={**self.task.schedule_states(progress.update), "sampler": sampler},
            rng=rng.capture(),
            provenance=provenance,
        )

    def load(self, reader: CheckpointReader) -> list[str]:
        """Fill weights, masters, optimizers, EMA and generator states. Returns what is not exact, in words."""
        notes: list[str] = []
        for name, network in self.task.networks.items():
            if name not in self.fresh:
                notes += _load_network(reader, name, network)
        if self.ema is not None:
            if "ema" in reader.groups():
                reader.read_into("ema", self.ema.shards())
            else:
                self.ema.reset()
                notes.append("the checkpoint holds no EMA: it starts again from the loaded weights")
        states = reader.rng(0)
        if states is not None:
            rng.restore(states)
        return notes


def _load_network(reader: CheckpointReader, name: str, network: Trained) -> list[str]:
    """Weights and buffers, then the fp32 masters from the best source there is, then the optimizer."""
    masters = network.master_shards()
    source = _MASTER[name] if _MASTER[name] in reader.groups() else name
    # cast: the checkpoint may be of a run with another compute dtype.
    reader.read_into(name, network.model_shards(), cast=True)
    reader.read_into(source, masters, cast=True)
    network.masters_changed()
    reader.read_into(_OPTIMIZER[name], network.optimizer_shards())
    dtypes = {dtype for dtype, _ in reader.tensors(source).values() if dtype.is_floating_point}
    if dtypes <= {torch.float32}:
        return []
    return [f"the checkpoint holds no fp32 weights of `{name}`: the resume is approximate"]
