"""What a training step means. The loop owns order, counters, saving and reporting; a task owns the mathematics."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from osora_cli.data.draws import draw_rng, draw_seed
from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import Trained, UpdateResult


@dataclass(frozen=True)
class StepContext:
    """Where a micro-batch stands; everything random in it is drawn from this.

    Attributes:
        seed: the run's seed.
        update: number of the update that this micro-batch goes into, from 0.
        micro: number of the micro-batch within that update, from 0.
        accumulation: micro-batches per update.
        rank, world_size: this process among all.
    """

    seed: int
    update: int
    micro: int
    accumulation: int
    rank: int
    world_size: int

    def rng(self, purpose: str) -> random.Random:
        """A fresh generator for one purpose; the same for the same place in any run."""
        return draw_rng(self.seed, "step", purpose, self.update, self.micro, self.rank)

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """The same for tensors that are drawn on a device. What is drawn differs between kinds of device."""
        seed = draw_seed(self.seed, "step", purpose, self.update, self.micro, self.rank)
        return torch.Generator(device).manual_seed(seed % 2**63)


class TrainTask(Protocol):
    """A kind of training. Values it returns are 0-d tensors on the device: reading them is the loop's decision."""

    networks: dict[str, Trained]
    """The trained networks by the name of their part in a checkpoint; the first is `model`."""

    def micro_step(self, batch: ClipBatch, context: StepContext) -> dict[str, torch.Tensor]:
        """Forward and backward of one micro-batch. Returns what to log; `loss` is among it."""

    def update(self, update: int) -> dict[str, UpdateResult]:
        """One optimizer update of each network, by the same names."""

    def learning_rate(self, update: int) -> float:
        """The first network's learning rate at an update."""

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        """State of each schedule by its file's name in a checkpoint, `lr_scheduler` first."""

    def notes(self) -> list[str]:
        """What a user should know once, at the start."""
