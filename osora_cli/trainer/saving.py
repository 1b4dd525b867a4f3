"""What goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.engine.base import Trained
from osora_cli.engine.ranks import SINGLE_RANK, Ranks
from osora_cli.errors import CheckpointError
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
    load_masters: bool = True
    """Whether a load takes the fp32 weights that a checkpoint holds beside those of the computation's dtype."""

    def contents(
        self, progress: Progress, sampler: dict[str, Any], batch_size: int | None, provenance: dict[str, Any]
    ) -> CheckpointContents:
        """The state at an update boundary; tensors are live, the store copies them."""
        for network in self.task.networks.values():
            network.sync_buffers()
        return CheckpointContents(
            counters=progress.counters(batch_size),
            sharded=self._shards(),
            param_groups={_OPTIMIZER[name]: net.param_groups() for name, net in self.task.networks.items()},
            small={**self.task.schedule_states(progress.update), "sampler": sampler},
            rng=rng.capture(),
            provenance=provenance,
        )

    def nbytes(self) -> int:
        """What the tensors of a checkpoint take on disk, as far as this rank knows them."""
        shards = [shard for group in self._shards().values() for shard in group]
        return sum(shard.numel * shard.dtype.itemsize for shard in shards)

    def held_bytes(self) -> int:
        """Of them, those that this rank hands over."""
        return sum(shard.tensor.nbytes for group in self._shards().values() for shard in group)

    def _shards(self) -> dict[str, list[TensorShard]]:
        """This rank's tensors by group."""
        sharded: dict[str, list[TensorShard]] = {}
        for name, network in self.task.networks.items():
            sharded[name] = network.model_shards()
            sharded[_OPTIMIZER[name]] = network.optimizer_shards()
            if self.save_masters and not network.is_own_master:
                sharded[_MASTER[name]] = network.master_shards()
        if self.ema is not None:
            sharded["ema"] = self.ema.shards()
        return sharded

    def load(self, reader: CheckpointReader, ranks: Ranks = SINGLE_RANK, seed: int = 0) -> list[str]:
        """Fill weights, masters, optimizers, EMA and generator states. Returns what is not exact, in words.

        Generator states are taken where the checkpoint is of as many ranks; else each rank draws anew from `seed`
        and the update.
        """
        notes: list[str] = []
        for name, network in self.task.networks.items():
            if name not in self.fresh:
                notes += _load_network(reader, name, network, self.load_masters)
        if self.ema is not None:
            if "ema" in reader.groups():
                reader.read_into("ema", self.ema.shards())
            else:
                self.ema.reset()
                notes.append("the checkpoint holds no EMA: it starts again from the loaded weights")
        before = ranks.world_size if reader.manifest is None else reader.manifest.world_size
        states = reader.rng(ranks.rank) if before == ranks.world_size else None
        if states is not None:
            rng.restore(states)
        elif before != ranks.world_size:
            rng.seed_rank(seed, ranks.rank, "resume", reader.counters.actual_update_step)
            notes.append(f"the checkpoint is of {before} ranks, this run of {ranks.world_size}: dropout draws anew")
        return notes


def _load_network(reader: CheckpointReader, name: str, network: Trained, load_masters: bool) -> list[str]:
    """Weights and buffers, then the fp32 masters from the best source there is, then the optimizer."""
    masters = network.master_shards()
    held = _MASTER[name] in reader.groups()
    source = _MASTER[name] if held and load_masters else name
    # cast: the checkpoint may be of a run with another compute dtype.
    reader.read_into(name, network.model_shards(), cast=True)
    reader.read_into(source, masters, cast=True)
    network.masters_changed()
    reader.read_into(_OPTIMIZER[name], network.optimizer_shards())
    with suppress(CheckpointError):  # told only: the next update brings its own
        network.set_lr(float(reader.param_groups(_OPTIMIZER[name])[0].get("lr", 0.0)))
    dtypes = {dtype for dtype, _ in reader.tensors(source).values() if dtype.is_floating_point}
    if dtypes <= {torch.float32}:
        return []
    why = "`load_master_weights` is false" if held else "the checkpoint holds none"
    return [f"without fp32 weights of `{name}` ({why}) the resume is approximate"]
