"""Training of a video autoencoder: reconstruction, perceptual and KL loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osora_cli.data.loader import ClipBatch
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine, Trained, UpdateResult
from osora_cli.model.losses import vae_loss
from osora_cli.trainer.mixing import Mixing
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext


@dataclass(frozen=True)
class VaeTaskSettings:
    """Weights of the losses, the clipping of gradients, and how stills are mixed in."""

    perceptual_weight: float
    kl_weight: float
    logvar: float
    grad_clip: float
    mixing: Mixing


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
        video = self._settings.mixing.apply(video, context)
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
        return self._settings.mixing.notes(self._engine.world_size)
