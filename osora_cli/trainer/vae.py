"""Training of a video autoencoder: reconstruction, perceptual and KL loss (algorithms.md 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osora_cli.data.loader import ClipBatch
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine, Trained, UpdateResult
from osora_cli.model.losses import vae_loss
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext


@dataclass(frozen=True)
class VaeTaskSettings:
    """Weights of the losses and how stills are mixed in.

    Attributes:
        lengths: the clip lengths up to a given one that the network takes, ascending.
    """

    perceptual_weight: float
    kl_weight: float
    logvar: float
    grad_clip: float
    mixed_strategy: str | None
    mixed_image_ratio: float
    lengths: Callable[[int], list[int]]


class VaeTask:
    """One network, one optimizer."""

    def __init__(
        self,
        network: Trained,
        engine: Engine,
        schedule: Schedule,
        settings: VaeTaskSettings,
        perceptual: nn.Module | None = None,
    ) -> None:
        self.networks = {"model": network}
        self._network = network
        self._engine = engine
        self._schedule = schedule
        self._settings = settings
        self._perceptual = perceptual

    def micro_step(self, batch: ClipBatch, context: StepContext) -> dict[str, torch.Tensor]:
        video = normalize(batch.video.to(self._engine.device, non_blocking=True))
        video = video[:, :, : self._frames(video.shape[2], context)]
        reconstruction, posterior, _ = self._network.module(video.to(self._network.compute_dtype))
        losses = vae_loss(
            video,
            reconstruction,
            perceptual=self._perceptual,
            perceptual_weight=self._settings.perceptual_weight,
            kl_weight=self._settings.kl_weight,
            posterior=posterior,
            logvar=self._settings.logvar,
        )
        self._network.backward(losses.total / context.accumulation)
        return {
            "loss": losses.total.detach(),
            "nll": losses.nll.detach(),
            "rec": losses.rec.detach(),
            "rec_per_pixel": losses.rec_per_pixel.detach(),
            "perceptual": losses.perceptual_mean.detach(),
            "kl": losses.kl.detach(),
        }

    def update(self, update: int) -> dict[str, UpdateResult]:
        return {"model": self._network.update(self._schedule.lr(update), self._settings.grad_clip)}

    def learning_rate(self, update: int) -> float:
        return self._schedule.lr(update)

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        return {"lr_scheduler": self._schedule.state(update)}

    def notes(self) -> list[str]:
        settings = self._settings
        if settings.mixed_strategy == "mixed_video_image" and self._engine.world_size == 1:
            return [
                f"mixed_video_image: stills (ratio {settings.mixed_image_ratio:g}) are taken by ranks other than 0, "
                "as in Open-Sora; one process trains on clips only"
            ]
        return []

    def _frames(self, frames: int, context: StepContext) -> int:
        """How many frames of this micro-batch are trained on (algorithms.md 8.3)."""
        strategy = self._settings.mixed_strategy
        if strategy is None or frames == 1:
            return frames
        rng = context.rng(strategy)
        if strategy == "mixed_video_random":
            return rng.choice(self._settings.lengths(frames))
        if context.rank == 0:
            return frames
        ratio = self._settings.mixed_image_ratio * context.world_size / (context.world_size - 1)
        return 1 if rng.random() < ratio else frames
