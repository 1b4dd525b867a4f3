"""Training of a video autoencoder against a discriminator: the second stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osora_cli.data.loader import ClipBatch
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine, Trained, UpdateResult
from osora_cli.model.losses import (
    DiscriminatorLossType,
    LastConvRecorder,
    VaeGanLoss,
    discriminator_loss,
    loss_factor,
    vae_gan_loss,
)
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext
from osora_cli.trainer.vae import VaeTaskSettings


@dataclass(frozen=True)
class GanSettings:
    """The adversarial terms. Updates are counted from 1, as in the log and in Open-Sora: the first one is update 1.

    Attributes:
        gen_start: first update in which the autoencoder's adversarial term counts.
        gen_ramp: updates over which it then grows to its full size; 0: at once.
        gen_factor: factor on it; 0 or None: off.
        disc_weight: share of the adversarial gradient at the last layer against the likelihood's.
        weight_per_rank: each rank has an adaptive weight of its own, as in Open-Sora; else all have the mean.
        disc_start: first update in which the discriminator is trained.
        disc_factor: factor on its loss; 0 or None: off.
        disc_loss: kind of its loss.
        max_ratio: the ratio of the two gradients' norms counts up to this.
    """

    gen_start: int
    gen_ramp: int
    gen_factor: float | None
    disc_weight: float
    weight_per_rank: bool
    disc_start: int
    disc_factor: float | None
    disc_loss: DiscriminatorLossType
    max_ratio: float = 1e4

    def gen_factor_at(self, number: int) -> float | None:
        """Factor on the adversarial term in update `number`, the ramp in it; before `gen_start` the term is off."""
        if self.gen_factor is None or number < self.gen_start:
            return self.gen_factor
        # Update 0 does not exist: a start of 0 is one of 1.
        done = number - max(1, self.gen_start) + 1
        return self.gen_factor * min(1.0, done / (self.gen_ramp + 1))

    def trains_disc(self, number: int) -> bool:
        """Whether the discriminator is trained in update `number`."""
        return loss_factor(number, self.disc_start, self.disc_factor) > 0


class VaeGanTask:
    """Two networks, two optimizers: the autoencoder is trained first, the discriminator on what that gave out.

    In each micro-batch the autoencoder's loss comes first, with the discriminator as it is; then the discriminator's
    own on the clip and on the detached reconstruction, in two forwards, for its batch norm has statistics of either.
    Both are made before either network is updated, so the order of the two updates does not matter.

    Dropout in the discriminator is drawn from (seed, update, micro-batch, rank, pass), so a resume draws the same.

    Args:
        network, schedule: the autoencoder.
        discriminator, disc_schedule: the discriminator.
        recorder: of the autoencoder's last convolution.
    """

    def __init__(
        self,
        network: Trained,
        discriminator: Trained,
        engine: Engine,
        schedule: Schedule,
        disc_schedule: Schedule,
        recorder: LastConvRecorder,
        settings: VaeTaskSettings,
        gan: GanSettings,
        perceptual: nn.Module | None = None,
    ) -> None:
        self.networks = {"model": network, "discriminator": discriminator}
        self._network, self._disc = network, discriminator
        self._engine = engine
        self._schedule, self._disc_schedule = schedule, disc_schedule
        self._recorder = recorder
        self._settings, self._gan = settings, gan
        self._perceptual = perceptual
        self._statistics = [
            (buffer, buffer.clone()) for buffer in discriminator.module.buffers() if buffer.is_floating_point()
        ]

    def micro_step(self, batch: ClipBatch, context: StepContext) -> dict[str, Tensor]:
        clips = normalize(batch.video.to(self._engine.device, non_blocking=True))
        video = self._settings.mixing.apply(clips, context)
        if context.micro == 0:
            self._keep_statistics()
        is_last = context.micro == context.accumulation - 1
        with _sync(self._network, is_last):
            losses, reconstruction = self._train_autoencoder(video, context)
        values = self._values(losses, video)
        values["stills"] = torch.full_like(values["loss"], float(video.shape[2] == 1 < clips.shape[2]))
        if self._gan.trains_disc(context.update + 1):
            with _sync(self._disc, is_last):
                values |= self._train_discriminator(video, reconstruction, context)
        return values

    def update(self, update: int) -> dict[str, UpdateResult]:
        """The discriminator is left alone before its start: weights, moments and their count."""
        clip = self._settings.grad_clip
        results = {"model": self._network.update(self._schedule.lr(update), clip)}
        if self._gan.trains_disc(update + 1):
            results["discriminator"] = self._disc.update(self._disc_schedule.lr(update), clip)
        self._mend_statistics()
        return results

    def learning_rate(self, update: int) -> float:
        return self._schedule.lr(update)

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        return {"lr_scheduler": self._schedule.state(update), "disc_lr_scheduler": self._disc_schedule.state(update)}

    def notes(self) -> list[str]:
        return self._settings.mixing.notes(self._engine.world_size)

    # -- the two losses -------------------------------------------------------------------------------------------

    def _train_autoencoder(self, video: Tensor, context: StepContext) -> tuple[VaeGanLoss, Tensor]:
        """The autoencoder's loss and its backward. Returns the reconstruction as it was, detached."""
        settings, gan, number = self._settings, self._gan, context.update + 1
        with self._recorder:
            reconstruction, posterior, _ = self._network.module(video.to(self._network.compute_dtype))
        # The discriminator's parameters gather no gradient here, so its ranks have nothing to exchange.
        with self._disc.no_sync(), self._drawing(context, "disc dropout, generator"):
            losses = vae_gan_loss(
                video,
                reconstruction,
                self._recorder,
                self._judge,
                update=number,
                perceptual=self._perceptual,
                perceptual_weight=settings.perceptual_weight,
                kl_weight=settings.kl_weight,
                posterior=posterior,
                logvar=settings.logvar,
                disc_weight=gan.disc_weight,
                max_ratio=gan.max_ratio,
                gen_start=gan.gen_start,
                disc_factor=gan.gen_factor_at(number),
                agree=None if gan.weight_per_rank else self._engine.mean_over_ranks,
            )
        detached: Tensor = reconstruction.detach()
        self._network.backward(losses.objective / context.accumulation)
        return losses, detached

    def _train_discriminator(self, video: Tensor, reconstruction: Tensor, context: StepContext) -> dict[str, Tensor]:
        with self._drawing(context, "disc dropout, real"):
            real = self._judge(video)
        with self._drawing(context, "disc dropout, fake"):
            fake = self._judge(reconstruction)
        gan = self._gan
        factor = loss_factor(context.update + 1, gan.disc_start, gan.disc_factor)
        loss = discriminator_loss(real, fake, gan.disc_loss) * factor
        self._disc.backward(loss / context.accumulation)
        return {
            "disc_loss": loss.detach(),
            "logits_real": real.detach().float().mean(),
            "logits_fake": fake.detach().float().mean(),
        }

    def _judge(self, video: Tensor) -> Tensor:
        logits: Tensor = self._disc.module(video.to(self._disc.compute_dtype))
        return logits

    def _values(self, losses: VaeGanLoss, video: Tensor) -> dict[str, Tensor]:
        """What is logged of the autoencoder's loss: means per value, and Open-Sora's sums over a frame's values."""
        vae, values_of_a_frame = losses.vae, video[0, :, 0].numel()
        nll = vae.nll.detach()
        return {
            "loss": losses.objective.detach(),
            "nll": nll,
            "nll_per_pixel": nll / values_of_a_frame,
            "rec": vae.rec,
            "rec_per_pixel": vae.rec_per_pixel,
            "perceptual": vae.perceptual_mean,
            "perceptual_sum": vae.perceptual,
            "kl": vae.kl.detach(),
            "gen_loss": losses.generator,
            "d_weight": losses.weight,
            "gen_factor": torch.full_like(nll, losses.factor),
            "last_layer_norm_nll": losses.nll_norm,
            "last_layer_norm_gen": losses.generator_norm,
        }

    # -- the discriminator's state --------------------------------------------------------------------------------

    @contextmanager
    def _drawing(self, context: StepContext, purpose: str) -> Iterator[None]:
        """The device's generator seeded for one pass, and as it was after it."""
        device = self._engine.device
        generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        before = generator.get_state()
        generator.manual_seed(context.rng(purpose).getrandbits(63))
        try:
            yield
        finally:
            generator.set_state(before)

    def _keep_statistics(self) -> None:
        for buffer, kept in self._statistics:
            kept.copy_(buffer)

    def _mend_statistics(self) -> None:
        """A clip that gave infinities must not stay in the running statistics: those as they were before the update."""
        for buffer, kept in self._statistics:
            buffer.copy_(torch.where(torch.isfinite(buffer).all(), buffer, kept))


def _sync(network: Trained, is_last: bool) -> AbstractContextManager[None]:
    """Gradients travel between ranks with the last micro-batch of an update only."""
    return nullcontext() if is_last else network.no_sync()
