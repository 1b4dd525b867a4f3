"""Sampling of the rectified flow: Euler steps from noise to a latent, with guidance by text and by image.

Shapes: B batch, C latent channels, T latent frames, H rows, W columns; N tokens of F features; L text tokens of width
D, P width of the pooled text vector.

The order of guidance, shift and Euler steps is that of Open-Sora 2.0. Time runs from 1 (noise) to 0 (data).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from osora_cli.model.flow import shift_alpha, shift_time
from osora_cli.model.mmdit.model import MMDiT
from osora_cli.model.mmdit.packing import Tokens, make_tokens, pack_condition, unpack

# Oscillating guidance: full strength in all of the first steps, then in every other one.
OSCILLATION_START = 10

Predict = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class SamplingSettings:
    """How a latent is sampled. Defaults are those of Open-Sora 2.0.

    Attributes:
        num_steps: Euler steps.
        guidance: strength of the text; 1: none, and the text is then evaluated without its negative.
        guidance_img: strength of the image condition, which counts only where a condition is given; None: text and
            image are guided together, as plain classifier-free guidance does it.
        text_osci, image_osci: after step 10, every other step goes without the guidance.
        scale_temporal_osci: the image's strength falls over the steps and rises over the frames, from 1.
        flow_shift: alpha of the time shift; None: from the latent's size.
        shift: False: no time shift.
        embedded_guidance: strength given to a model that embeds one (FLUX.1-dev).
    """

    num_steps: int = 50
    guidance: float = 7.5
    guidance_img: float | None = 3.0
    text_osci: bool = True
    image_osci: bool = True
    scale_temporal_osci: bool = True
    flow_shift: float | None = None
    shift: bool = True
    embedded_guidance: float = 4.0


@dataclass(frozen=True)
class TextVectors:
    """Embedded texts of a batch: tokens `[B or 1, L, D]` and pooled vectors `[B or 1, P]`."""

    tokens: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class ImageCondition:
    """Latent frames that are given: mask `[B, 1, T, H, W]` of 0 and 1, and their latent `[B, C, T, H, W]`."""

    mask: Tensor
    latent: Tensor


def timestep_schedule(num_steps: int, alpha: float | None = None) -> Tensor:
    """The times `[num_steps + 1]`, fp32: evenly from 1 to 0, then shifted by `alpha` (None: not shifted).

    Raises:
        ValueError: fewer than one step.
    """
    if num_steps < 1:
        raise ValueError(f"`{num_steps}` steps: at least 1 is needed")
    times = torch.linspace(1, 0, num_steps + 1)
    return times if alpha is None else shift_time(times, alpha)


def oscillating(strength: float, step: int) -> float:
    """Guidance at a step, counted from 0: full in the first ten and then in the even ones, else 1, which is none."""
    return strength if step < OSCILLATION_START or step % 2 == 0 else 1.0


def image_strengths(strength: float, step: int, num_steps: int, frames: int) -> Tensor:
    """The image's guidance over latent frames `[frames]`, fp32: from 1 to a bound that falls to 1 over the steps."""
    bound = torch.linspace(strength, 1.0, num_steps + 1)[step]
    return torch.linspace(1.0, float(bound), frames)


def initial_noise(seed: int, shape_CTHW: tuple[int, ...]) -> Tensor:
    """Standard normal latent `[1, C, T, H, W]`, fp32 on the CPU, from `seed` alone: the same on every device."""
    return torch.randn((1, *shape_CTHW), generator=torch.Generator().manual_seed(seed))


def euler(predict: Predict, x: Tensor, times: Tensor) -> Tensor:
    """Integrate dx/dt = predict(x, t) along `times`, one Euler step each: x += (t_next - t) * v, in fp32."""
    steps: list[float] = times.tolist()
    for now, then in itertools.pairwise(steps):
        x = x + (then - now) * predict(x, now).float()
    return x


@torch.no_grad()
def sample_latents(
    model: MMDiT | Callable[..., Tensor],
    noise_BCTHW: Tensor,
    text: TextVectors,
    negative: TextVectors,
    settings: SamplingSettings,
    *,
    patch_size: int,
    condition: ImageCondition | None = None,
    cond_embed: bool = False,
    guidance_embed: bool = False,
) -> Tensor:
    """Latents `[B, C, T, H, W]` in fp32 from noise. Draws nothing, so equal noise gives equal latents.

    Args:
        model: the MMDiT, or what an engine wraps it in.
        noise_BCTHW: fp32, on the model's device.
        text, negative: what the sample should follow, and what it is pushed away from (the embedding of "").
        patch_size, cond_embed, guidance_embed: the model's.
        condition: frames that are given; None: none, which a model with `cond_embed` sees as zeros.

    Raises:
        ConfigError: the latent cannot be cut into patches.
        ValueError: a condition for a model without `cond_embed`, or texts of another number than the noise.
    """
    if condition is not None and not cond_embed:
        raise ValueError("a condition is given, and the model has no cond_embed to see it")
    frames, rows, columns = noise_BCTHW.shape[2:]
    alpha = None
    if settings.shift:
        given = settings.flow_shift
        alpha = shift_alpha(frames, rows, columns, patch_size) if given is None else given
    times = timestep_schedule(settings.num_steps, alpha)
    guide = _Guide(model, settings, patch_size, cond_embed, guidance_embed)
    guide.prepare(noise_BCTHW, text, negative, condition)
    tokens = guide.tokens
    x_BNF = euler(guide, tokens.img[: len(noise_BCTHW)], times)
    return unpack(x_BNF, tokens.grid, patch_size)


class _Guide:
    """The guided velocity: one call of the model over the variants side by side, then their combination.

    Variants of each sample: the text; with text guidance also the negative text; with image guidance also the negative
    text without the condition.
    """

    tokens: Tokens

    def __init__(
        self,
        model: MMDiT | Callable[..., Tensor],
        settings: SamplingSettings,
        patch_size: int,
        cond_embed: bool,
        guidance_embed: bool,
    ) -> None:
        self._model, self._settings, self._patch = model, settings, patch_size
        self._cond_embed, self._guidance_embed = cond_embed, guidance_embed
        self._step = 0

    def prepare(
        self, noise_BCTHW: Tensor, text: TextVectors, negative: TextVectors, condition: ImageCondition | None
    ) -> None:
        settings, batch = self._settings, len(noise_BCTHW)
        self._with_image = condition is not None and settings.guidance_img is not None
        self._variants = 3 if self._with_image else (1 if settings.guidance == 1 else 2)
        texts = [text, negative, negative][: self._variants]
        self.tokens = make_tokens(
            noise_BCTHW.repeat(self._variants, 1, 1, 1, 1),
            torch.cat([t.tokens.to(noise_BCTHW.device).expand(batch, -1, -1) for t in texts]),
            torch.cat([t.pooled.to(noise_BCTHW.device).expand(batch, -1) for t in texts]),
            self._patch,
        )
        self._cond = self._condition(noise_BCTHW, condition) if self._cond_embed else None

    def __call__(self, x_BNF: Tensor, time: float) -> Tensor:
        tokens, variants = self.tokens, self._variants
        total = variants * len(x_BNF)
        v = self._model(
            img=x_BNF.repeat(variants, 1, 1),
            img_ids=tokens.img_ids,
            txt=tokens.txt,
            txt_ids=tokens.txt_ids,
            timesteps=torch.full((total,), time, device=x_BNF.device),
            y_vec=tokens.y_vec,
            cond=self._cond,
            guidance=self._embedded(total, x_BNF.device),
        ).float()
        guided = self._combine(v.chunk(variants))
        self._step += 1
        return guided

    def _combine(self, parts: tuple[Tensor, ...]) -> Tensor:
        settings, step = self._settings, self._step
        if len(parts) == 1:
            return parts[0]
        text = oscillating(settings.guidance, step) if settings.text_osci else settings.guidance
        if len(parts) == 2:
            with_text, without = parts
            return without + text * (with_text - without)
        with_text, without, without_image = parts
        return without_image + self._image(parts[0]) * (without - without_image) + text * (with_text - without)

    def _image(self, like: Tensor) -> Tensor | float:
        """Strength of the image at this step: one number, or one a token."""
        settings, step = self._settings, self._step
        assert settings.guidance_img is not None
        strength = oscillating(settings.guidance_img, step) if settings.image_osci else settings.guidance_img
        if not settings.scale_temporal_osci or strength <= 1:
            return strength
        frames, rows, columns = self.tokens.grid
        by_frame = image_strengths(settings.guidance_img, step, settings.num_steps, frames).to(like.device)
        return by_frame.repeat_interleave(rows * columns)[None, :, None]

    def _condition(self, noise_BCTHW: Tensor, condition: ImageCondition | None) -> Tensor:
        none = torch.zeros_like(noise_BCTHW)
        nothing = pack_condition(none[:, :1], none, self._patch)
        if condition is None:
            return nothing.repeat(self._variants, 1, 1)
        given = pack_condition(condition.mask.to(none), condition.latent.to(none), self._patch)
        parts = [given] * min(self._variants, 2) + [nothing] * (self._variants - 2)
        return torch.cat(parts)

    def _embedded(self, total: int, device: torch.device) -> Tensor | None:
        if not self._guidance_embed:
            return None
        return torch.full((total,), self._settings.embedded_guidance, device=device)
