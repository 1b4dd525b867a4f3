"""Training of the diffusion transformer: rectified flow over latents (Liu et al. 2022, arXiv:2209.03003).

Latents, times and the loss are fp32; the model computes in its own dtype.

Shapes: B batch, C channels, T frames, H rows, W columns of latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osora_cli.data.cached_batch import CachedBatch
from osora_cli.data.loader import ClipBatch
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine, Trained, UpdateResult
from osora_cli.engine.cuda import strictly_deterministic
from osora_cli.model.flow import shift_alpha
from osora_cli.model.latents import FrozenParts, TextBundle, embed_texts, encode_latents, predict_velocity
from osora_cli.model.text import padded_length
from osora_cli.trainer.conditions import CachedParts, ClipParts, LatentRules, PixelParts, draw_kinds, make_condition
from osora_cli.trainer.flow import interpolate, kept_frames, sample_losses, training_times, velocity
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext


@dataclass(frozen=True)
class DiffusionTaskSettings:
    """How a step is made.

    Attributes:
        patch_size: edge of a patch of the model.
        rules: how the autoencoder counts time.
        sigma_min: share of noise left at time 0.
        dropout_t5, dropout_clip: share of samples whose text tokens, or pooled vector, are those of the empty text.
        condition_weights: weights of the kinds of condition; None: the model takes none.
        no_reference_loss: leave frames that an image condition shows out of the loss.
        guidance: told to a model that embeds it; None: it does not.
        sequence_ranks: ranks that share the tokens of a sample: texts are padded until tokens divide by it.
        ae_batch_size: clips encoded at a time; None: all.
    """

    patch_size: int
    rules: LatentRules
    sigma_min: float
    dropout_t5: float
    dropout_clip: float
    condition_weights: Mapping[str, float] | None
    no_reference_loss: bool
    guidance: float | None
    grad_clip: float
    sequence_ranks: int = 1
    ae_batch_size: int | None = None


@dataclass(frozen=True)
class Sample:
    """A batch on the device, ready for a step.

    Attributes:
        latents: of the whole clips, fp32 `[B, C, T, H, W]`.
        text: embedded captions, with dropout done.
        cond: mask and masked latent `[B, 1 + C, T, H, W]`, or None.
    """

    latents: Tensor
    text: TextBundle
    cond: Tensor | None


class DiffusionTask:
    """One network, one optimizer; autoencoder and text embedders are frozen."""

    def __init__(
        self,
        network: Trained,
        engine: Engine,
        schedule: Schedule,
        settings: DiffusionTaskSettings,
        parts: FrozenParts,
        null: TextBundle,
    ) -> None:
        """`null` is the embedding of the empty text, of one sample."""
        self.networks = {"model": network}
        self._network = network
        self._engine = engine
        self._schedule = schedule
        self._settings = settings
        self._parts = parts
        self._null = null.to(engine.device)

    def micro_step(self, batch: ClipBatch, context: StepContext) -> dict[str, Tensor]:
        sample = self.prepare(batch, context)
        loss = self.loss(sample, context)
        with strictly_deterministic():
            self._network.backward(loss / context.accumulation)
        return {"loss": loss.detach()}

    def rehearse(self, size: tuple[int, int, int, int, int]) -> None:
        """Forward, backward and update on a batch of latents `[B, C, T, H, W]`, after which all is as it was.

        For what comes with the first batch of a shape, as kernels that are compiled for it. Nothing is drawn, and the
        gradient is not finite, so that the engine drops it. All ranks call it with the same size.
        """
        device, settings = self._engine.device, self._settings
        latents = torch.zeros(size, device=device)
        length = padded_length(
            self._null.t5.shape[1], latents[0, 0].numel() // settings.patch_size**2, settings.sequence_ranks
        )
        null = self._null.extended(length)
        cond = None
        if settings.condition_weights is not None:
            cond = torch.zeros(size[0], 1 + size[1], *size[2:], device=device)
        text = TextBundle(null.t5.expand(size[0], -1, -1), null.clip.expand(size[0], -1))
        predicted = predict_velocity(
            self._network.module,
            latents,
            torch.zeros(size[0], device=device),
            text,
            cond,
            settings.guidance,
            patch_size=settings.patch_size,
        )
        self._network.backward(predicted.float().mean() * torch.nan)
        lr = float(self._network.param_groups()[0]["lr"])
        if not float(self._network.update(lr, settings.grad_clip).skipped):
            raise RuntimeError("an update whose gradient is not finite was made")

    def update(self, update: int) -> dict[str, UpdateResult]:
        return {"model": self._network.update(self._schedule.lr(update), self._settings.grad_clip)}

    def learning_rate(self, update: int) -> float:
        return self._schedule.lr(update)

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        return {"lr_scheduler": self._schedule.state(update)}

    def notes(self) -> list[str]:
        return []

    @torch.no_grad()
    def prepare(self, batch: ClipBatch, context: StepContext) -> Sample:
        """Latents, condition and text of a batch, read from a cache or made."""
        latents, parts = self._latents(batch, context)
        return Sample(latents, self._text(batch, latents, context), self._condition(latents, parts, context))

    def loss(self, sample: Sample, context: StepContext) -> Tensor:
        """The step's loss, 0-d fp32, with noise and times drawn for it."""
        settings, device = self._settings, self._engine.device
        data, size = sample.latents, sample.latents.shape
        alpha = shift_alpha(size[2], size[3], size[4], settings.patch_size)
        normal_B = torch.randn(size[0], generator=context.generator("time", device), device=device)
        t_B = training_times(normal_B, alpha)
        noise = torch.randn(size, generator=context.generator("noise", device), device=device)
        predicted = predict_velocity(
            self._network.module,
            interpolate(data, noise, t_B, settings.sigma_min),
            t_B,
            sample.text,
            sample.cond,
            settings.guidance,
            patch_size=settings.patch_size,
        )
        kept_BT = None
        if settings.no_reference_loss and sample.cond is not None:
            kept_BT = kept_frames(sample.cond[:, 0, :, 0, 0])
        return sample_losses(predicted, velocity(data, noise, settings.sigma_min), kept_BT).mean()

    def _latents(self, batch: ClipBatch, context: StepContext) -> tuple[Tensor, ClipParts]:
        """Latents of the clips, and where those of their parts come from."""
        device = self._engine.device
        if isinstance(batch, CachedBatch) and batch.latents is not None:
            latents = batch.latents.to(device, torch.float32, non_blocking=True)
            return latents, CachedParts(batch.parts)
        assert self._parts.ae is not None, "pixels, and no autoencoder"
        video = normalize(batch.video.to(device, non_blocking=True))
        parts = PixelParts(video, lambda pieces: self._encode(pieces, context.generator("parts", device)))
        return self._encode(video, context.generator("posterior", device)), parts

    def _encode(self, video: Tensor, generator: torch.Generator) -> Tensor:
        assert self._parts.ae is not None
        return encode_latents(self._parts.ae, video, generator, batch_size=self._settings.ae_batch_size).float()

    def _condition(self, latents: Tensor, parts: ClipParts, context: StepContext) -> Tensor | None:
        weights, rules = self._settings.condition_weights, self._settings.rules
        if weights is None:
            return None
        kinds = draw_kinds(weights, latents.shape[0], latents.shape[2], rules, context.rng("condition"))
        return make_condition(kinds, latents, parts, rules)

    def _text(self, batch: ClipBatch, latents: Tensor, context: StepContext) -> TextBundle:
        """The batch's texts, some of them replaced by the empty one, each embedder's by a draw of its own."""
        settings, device = self._settings, self._engine.device
        _, _, frames, rows, columns = latents.shape
        image_tokens = frames * rows * columns // settings.patch_size**2
        if isinstance(batch, CachedBatch) and batch.t5 is not None and batch.clip is not None:
            text = TextBundle(batch.t5, batch.clip).to(device)
            length = padded_length(text.t5.shape[1], image_tokens, settings.sequence_ranks)
            text = text.extended(length)
        else:
            length = padded_length(self._null.t5.shape[1], image_tokens, settings.sequence_ranks)
            text = embed_texts(self._parts, batch.texts, length=length)
        null = self._null.extended(length)
        return TextBundle(
            dropped(text.t5, null.t5, self._draws("drop-t5", len(text), context), settings.dropout_t5),
            dropped(text.clip, null.clip, self._draws("drop-clip", len(text), context), settings.dropout_clip),
        )

    def _draws(self, purpose: str, count: int, context: StepContext) -> Tensor:
        device = self._engine.device
        return torch.rand(count, generator=context.generator(purpose, device), device=device)


def dropped(value: Tensor, null: Tensor, uniform_B: Tensor, share: float) -> Tensor:
    """`value` [B, ...], with `null` [1, ...] in place of samples whose draw from [0, 1) is below `share`."""
    chosen = (uniform_B < share).view(-1, *(1,) * (value.ndim - 1))
    return torch.where(chosen, null.to(value), value)
