"""`--dry-run`: the whole plan of a training, without its folder, its networks' memory or a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from osora_cli.app.doctor.system import existing_folder, write_speed
from osora_cli.app.dry_run.estimate import MemoryEstimate, estimate
from osora_cli.app.dry_run.fit import device_bytes, memory_fault
from osora_cli.app.dry_run.meta_engine import NetworkSize
from osora_cli.app.dry_run.probes import make_probe
from osora_cli.app.dry_run.shapes import batch_shapes, filled_buckets
from osora_cli.app.recipes import check_training
from osora_cli.app.schedules import total_updates
from osora_cli.checkpoint.fsio import free_bytes
from osora_cli.config.schema import TrainConfig

SCHEMA_VERSION = 1
# Of the disk's speed test: long enough to leave a cache of a few megabytes behind.
_TEST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SavePlan:
    """The checkpoints that the run will make.

    Attributes:
        count: saves in all, those by the clock not among them.
        kept: of them on disk at the end.
        bytes_each: of one.
        seconds_each: until one is durable, at the speed measured now; None where it could not be.
        free_bytes: left on the disk that runs go to.
    """

    count: int
    kept: int
    bytes_each: int
    seconds_each: float | None
    free_bytes: int

    @property
    def bytes_at_most(self) -> int:
        """One more than is kept is there while it is written."""
        return self.bytes_each * (self.kept + 1 if self.count > self.kept else self.kept)


@dataclass(frozen=True)
class DryRun:
    """What a training would take."""

    command: str
    folder: str
    networks: list[NetworkSize]
    memory: MemoryEstimate
    gpu_bytes: int | None
    memory_fault: str | None
    ranks: int
    updates: int
    batches_per_epoch: int
    saves: SavePlan
    notes: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What will not work as it is."""
        found = []
        if self.memory_fault is not None:
            found.append(self.memory_fault)
        if self.saves.bytes_at_most > self.saves.free_bytes:
            found.append(
                f"the checkpoints take up to {self.saves.bytes_at_most / 1e9:.1f} GB and "
                f"{self.saves.free_bytes / 1e9:.1f} GB are free: `--keep-n-latest N`, or another `--outputs DIR`"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "folder": self.folder,
            "networks": [vars(network) for network in self.networks],
            "memory_bytes": self.memory.to_json(),
            "gpu_bytes": self.gpu_bytes,
            "ranks": self.ranks,
            "updates": self.updates,
            "batches_per_epoch": self.batches_per_epoch,
            "saves": {**vars(self.saves), "bytes_at_most": self.saves.bytes_at_most},
            "warnings": self.warnings,
            "notes": self.notes,
        }


def dry_run(
    command: str,
    config: TrainConfig,
    *,
    config_name: str,
    ranks: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Check the config and the data as a training does, and work out what it would take.

    Args:
        ranks: GPUs that the run is to have.
        tell: what is being done, for steps that take seconds.

    Raises:
        OsoraError: what would end the training before its first step, with the same exit code.
    """
    tell("reading the table")
    training = check_training(command, config)
    training.report.require_batches()
    training.check_start(None)
    tell("tracing a step on the meta device")
    probe = make_probe(command, training.config)
    memory = estimate(probe, training.config, batch_shapes(training.config, filled_buckets(training.report)), ranks)
    updates = (
        total_updates(training.config, training.sampler) // ranks if config.max_steps is None else config.max_steps
    )
    outputs = Path(config.outputs)
    available = device_bytes(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    tell("measuring the disk")
    return DryRun(
        command=command,
        folder=str(outputs / (config.exp_name or f"{config_name}-DATE-TIME")),
        networks=[net.size(name) for name, net in zip(probe.names, probe.engine.trained, strict=True)],
        memory=memory,
        gpu_bytes=available,
        memory_fault=memory_fault(memory, config, ranks, available),
        ranks=ranks,
        updates=updates,
        batches_per_epoch=len(training.sampler.epoch_batches(0)) // ranks,
        saves=plan_saves(config, updates, memory.checkpoint, outputs),
        notes=list(training.notes),
    )


def plan_saves(config: TrainConfig, updates: int, size: int, outputs: Path) -> SavePlan:
    """How many checkpoints, how many of them stay, and how long one takes on that disk."""
    count = 1 if config.ckpt_every == 0 else -(-updates // config.ckpt_every)
    permanent = updates // config.keep_every if config.keep_every else 0
    kept = count if config.keep_n_latest < 0 else min(count, max(1, config.keep_n_latest) + permanent)
    where = existing_folder(outputs)
    free = free_bytes(where)
    seconds = None
    if free > 2 * _TEST_BYTES:
        try:
            seconds = size / write_speed(where, _TEST_BYTES)[1]
        except OSError:
            seconds = None
    return SavePlan(count, kept, size, seconds, free)
