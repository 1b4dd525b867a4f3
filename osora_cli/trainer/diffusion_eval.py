"""What a diffusion model is scored on while it trains: the flow loss at fixed times and noise, and sampled clips.

The training loss is another draw of times and noise each step, and so noisy that a trend is hard to see; at fixed ones
it is a figure that can be compared between updates, and read by how far from the data the time is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from osora_cli.data.draws import draw_seed
from osora_cli.data.media import MediaError, write_video
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine
from osora_cli.metrics.psnr import psnr
from osora_cli.model.flow import shift_alpha, shift_time
from osora_cli.model.latents import Autoencoder, FrozenParts, TextBundle, embed_texts, encode_latents, predict_velocity
from osora_cli.model.sampling import ImageCondition, SamplingSettings, TextVectors, initial_noise, sample_latents
from osora_cli.trainer import rng
from osora_cli.trainer.conditions import LatentRules, PixelParts, make_condition
from osora_cli.trainer.evaluation import Evaluation, evaluation_mode
from osora_cli.trainer.flow import interpolate, sample_losses, velocity
from osora_cli.trainer.saving import RunState

FOLDER, PICTURE = "eval", "samples"
_GROUPS = 4
_SHOWN_FRAMES = 6
_RULE = 4  # pixels between the pictures of a strip
_STILL_FPS = 1.0


@dataclass(frozen=True)
class EvalClip:
    """A clip to score on.

    Attributes:
        name: for the file of its sample.
        video: uint8 `[3, T, H, W]`.
        caption: as training has it.
        fps: frames a second; 0 for a still.
    """

    name: str
    video: Tensor
    caption: str
    fps: float


@dataclass(frozen=True)
class DiffusionEvalSettings:
    """How the model is scored.

    Attributes:
        every: updates between scorings.
        quantiles: of the times that training draws; the loss is taken at the middle of each.
        seed: of all noise.
        batch_size: points of time that go through the model at once.
        patch_size, cond_embed: the model's.
        guidance: told to a model that embeds it; None: it does not.
        sigma_min, rules: the training's.
        sampling: Euler steps and guidance.
        image_to_video: show the first frame of the clip to the model that samples.
        pictures: clips that are sampled.
        raw_too: score the weights beside their average.
    """

    every: int
    patch_size: int
    cond_embed: bool
    guidance: float | None
    sigma_min: float
    rules: LatentRules
    sampling: SamplingSettings
    image_to_video: bool = False
    quantiles: int = 8
    seed: int = 42
    batch_size: int = 2
    pictures: int = 2
    raw_too: bool = True


@dataclass(frozen=True)
class _Scored:
    """A clip as the model takes it, on the CPU: latent `[1, C, T, H, W]` in fp32 and its text."""

    latent: Tensor
    text: TextBundle


class DiffusionEvaluator:
    """Flow loss (`flow_loss_ema`, `_raw`; `..._q1` to `_q4` from the quarter nearest to data to that nearest to noise),
    mean over clips, and samples with their PSNR to the clip whose caption they follow.

    Rank r scores clips r, r + R, ...; all ranks call the model equally often, and all sample the same clips, so that a
    model that is spread over them can be called. The first rank decodes and writes: a strip in TensorBoard and
    RUN/eval/, and an mp4 beside it.

    Args:
        clips: all that count, the same on every rank.
        null: embedding of the empty text.
        folder: the run's.
    """

    def __init__(
        self,
        settings: DiffusionEvalSettings,
        clips: Sequence[EvalClip],
        engine: Engine,
        state: RunState,
        parts: FrozenParts,
        null: TextBundle,
        folder: Path,
    ) -> None:
        if parts.ae is None:
            raise ValueError("the autoencoder was not built")
        self.every = settings.every
        self._settings, self._clips, self._engine, self._state = settings, list(clips), engine, state
        self._ae: Autoencoder = parts.ae
        self._parts, self._null, self._folder = parts, null, folder / FOLDER
        self._scored: dict[int, _Scored] = {}

    def evaluate(self, update: int) -> Evaluation:
        started = time.perf_counter()
        network, ema = self._state.task.networks["model"], self._state.ema
        scores: dict[str, float] = {}
        samples: list[Tensor] = []
        kept = rng.capture()
        try:
            with torch.no_grad(), evaluation_mode(network.module):
                if ema is not None:
                    with ema.swapped(network):
                        scores |= self._losses(network.module, "ema")
                        samples = self._samples(network.module)
                if ema is None or self._settings.raw_too:
                    scores |= self._losses(network.module, "raw")
                if ema is None:
                    samples = self._samples(network.module)
                pictures = self._show(samples, update, scores)
        finally:
            rng.restore(kept)
        scores["time_s"] = round(time.perf_counter() - started, 3)
        return Evaluation({name: value for name, value in scores.items() if math.isfinite(value)}, pictures)

    # -- loss -------------------------------------------------------------------------------------------------------

    def _losses(self, model: nn.Module, weights: str) -> dict[str, float]:
        """Mean over the clips of all ranks, in all and by quarter of the times."""
        mine, rounds = self._share()
        sums = torch.zeros(_GROUPS + 1, dtype=torch.float64)
        for number in range(rounds):
            counts = number < len(mine)
            values = self._clip_losses(model, mine[number] if counts else 0)
            if counts:
                groups = values.double().tensor_split(_GROUPS)
                sums += torch.tensor([*(float(group.mean()) for group in groups), 1.0], dtype=torch.float64)
        *quarters, share = self._engine.mean_over_ranks(sums.to(self._engine.device)).tolist()
        means = [value / share for value in quarters]
        names = [f"flow_loss_{weights}_q{number + 1}" for number in range(_GROUPS)]
        return {f"flow_loss_{weights}": sum(means) / _GROUPS, **dict(zip(names, means, strict=True))}

    def _clip_losses(self, model: nn.Module, index: int) -> Tensor:
        """Loss at each point of time, from data to noise, `[quantiles]` on the CPU."""
        settings, device, clip = self._settings, self._engine.device, self._prepared(index)
        frames, rows, columns = clip.latent.shape[2:]
        times = quantile_times(settings.quantiles, shift_alpha(frames, rows, columns, settings.patch_size))
        text, data = clip.text.to(device), clip.latent.to(device)
        cond = torch.zeros_like(torch.cat([data[:, :1], data], dim=1)) if settings.cond_embed else None
        losses = []
        for points in torch.arange(settings.quantiles).split(settings.batch_size):
            drawn = [
                initial_noise(draw_seed(settings.seed, "eval noise", index, int(q)) % 2**63, tuple(data.shape[1:]))
                for q in points
            ]
            noise, t_B, count = torch.cat(drawn).to(device), times[points].to(device), len(points)
            predicted = predict_velocity(
                model,
                interpolate(data, noise, t_B, settings.sigma_min),
                t_B,
                TextBundle(text.t5.expand(count, -1, -1), text.clip.expand(count, -1)),
                None if cond is None else cond.expand(count, -1, -1, -1, -1),
                settings.guidance,
                patch_size=settings.patch_size,
            )
            losses.append(sample_losses(predicted, velocity(data, noise, settings.sigma_min)).cpu())
        return torch.cat(losses)

    def _share(self) -> tuple[list[int], int]:
        """This rank's clips, and how many each rank goes through: who has fewer repeats one that does not count."""
        ranks, count = self._engine.ranks.data_replicas, len(self._clips)
        # Ranks that share a sample's tokens go through the same clips.
        return list(range(self._engine.ranks.data_rank, count, ranks)), -(-count // ranks)

    def _prepared(self, index: int) -> _Scored:
        """A clip's latent (of a posterior the mean) and text; made once."""
        if index not in self._scored:
            clip = self._clips[index]
            video = normalize(clip.video[None].to(self._engine.device))
            latent = encode_latents(self._ae, video).float().cpu()
            self._scored[index] = _Scored(latent, embed_texts(self._parts, [clip.caption]).to("cpu"))
        return self._scored[index]

    # -- samples ----------------------------------------------------------------------------------------------------

    def _samples(self, model: nn.Module) -> list[Tensor]:
        """Latents of the clips that are shown, `[1, C, T, H, W]` each."""
        settings, device = self._settings, self._engine.device
        negative = TextVectors(self._null.t5, self._null.clip)
        made = []
        for index in range(min(settings.pictures, len(self._clips))):
            clip = self._prepared(index)
            noise = initial_noise(draw_seed(settings.seed, "sample", index) % 2**63, tuple(clip.latent.shape[1:]))
            made.append(
                sample_latents(
                    model,
                    noise.to(device),
                    TextVectors(clip.text.t5, clip.text.clip),
                    negative,
                    settings.sampling,
                    patch_size=settings.patch_size,
                    condition=self._first_frame(index) if settings.image_to_video else None,
                    cond_embed=settings.cond_embed,
                    guidance_embed=settings.guidance is not None,
                )
            )
        return made

    def _first_frame(self, index: int) -> ImageCondition | None:
        """The clip's first frame as what is given; None for a still, which has no more than that."""
        latent = self._prepared(index).latent.to(self._engine.device)
        if latent.shape[2] == 1:
            return None
        video = normalize(self._clips[index].video[None].to(self._engine.device))
        parts = PixelParts(video, lambda pieces: encode_latents(self._ae, pieces).float())
        cond = make_condition(["i2v_head"], latent, parts, self._settings.rules)
        return ImageCondition(cond[:, :1], cond[:, 1:])

    def _show(self, samples: list[Tensor], update: int, scores: dict[str, float]) -> dict[str, NDArray[np.uint8]]:
        """Decode, measure and write the samples; on the first rank alone. The strip of all of them."""
        if self._engine.rank or not samples:
            return {}
        dtype = next(iter(self._ae.parameters())).dtype
        videos = [to_pixels(self._ae.decode(latent.to(dtype))[0]) for latent in samples]
        scores |= match_scores(videos, [clip.video for clip in self._clips])
        unwritten = [self._write(clip, video, update) for clip, video in zip(self._clips, videos, strict=False)]
        if any(unwritten):
            scores["samples_not_written"] = float(sum(unwritten))
        pairs = [(clip.video, video) for clip, video in zip(self._clips, videos, strict=False)]
        return {PICTURE: strip(pairs)}

    def _write(self, clip: EvalClip, video: Tensor, update: int) -> bool:
        """RUN/eval/updateN-NAME.mp4, in one rename. Whether it could not be written: that must not end a training."""
        path = self._folder / f"update{update:07d}-{clip.name}.mp4"
        # The writer goes by the extension.
        unfinished = path.with_name(f".{path.stem}.unfinished.mp4")
        frames = video.permute(1, 2, 3, 0).contiguous().numpy()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_video(unfinished, frames, clip.fps or _STILL_FPS)
            unfinished.replace(path)
        except (OSError, MediaError):
            return True
        return False


def quantile_times(quantiles: int, alpha: float) -> Tensor:
    """Times in the middle of equal shares of those that training draws, ascending, fp32 `[quantiles]`.

    Training draws the sigmoid of a standard normal, shifted by `alpha`.
    """
    shares = (torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles
    return shift_time(torch.sigmoid(torch.special.ndtri(shares)), alpha).float()


def to_pixels(video: Tensor) -> Tensor:
    """A clip `[3, T, H, W]` in [-1, 1], what is outside cut off, as uint8 on the CPU."""
    return ((video.float().nan_to_num(0).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()


def match_scores(samples: Sequence[Tensor], clips: Sequence[Tensor]) -> dict[str, float]:
    """How well samples resemble their clips, and whether it is theirs that they resemble. All uint8 `[3, T, H, W]`.

    `sample_psnr`: of each sample to the clip with its caption, dB, mean. `sample_psnr_others`: to the nearest of the
    other clips of its shape, mean. `sample_matches`: share of samples whose own clip is the nearest of all. The last
    two are left out where there are no others.
    """
    own, others, nearest = [], list[float](), list[float]()
    for index, sample in enumerate(samples):
        values = {
            number: float(psnr(sample[None] / 255, clip[None] / 255, 1.0))
            for number, clip in enumerate(clips)
            if clip.shape == sample.shape
        }
        if index not in values:
            continue
        own.append(values.pop(index))
        if values:
            others.append(max(values.values()))
            nearest.append(float(own[-1] > others[-1]))
    out = {"sample_psnr": own, "sample_psnr_others": others, "sample_matches": nearest}
    return {name: sum(values) / len(values) for name, values in out.items() if values}


def strip(pairs: Sequence[tuple[Tensor, Tensor]]) -> NDArray[np.uint8]:
    """Two rows a pair, a clip's frames over its sample's, the same few of both: uint8 `[H, W, 3]` on white."""
    rows = []
    for pair in pairs:
        frames = pair[0].shape[1]
        chosen = np.linspace(0, frames - 1, min(_SHOWN_FRAMES, frames)).round().astype(int).tolist()
        for video in pair:
            number = [min(frame, video.shape[1] - 1) for frame in chosen]
            rows.append(_joined([video[:, frame].permute(1, 2, 0).numpy() for frame in number], axis=1))
    return _joined(rows, axis=0)


def _joined(images: Sequence[NDArray[np.uint8]], axis: int) -> NDArray[np.uint8]:
    """Images `[H, W, 3]` side by side (1) or under each other (0), with a white rule between them."""
    across = 1 - axis
    most = max(image.shape[across] for image in images)
    parts: list[NDArray[np.uint8]] = []
    for image in images:
        padding = [(0, 0), (0, 0), (0, 0)]
        padding[across] = (0, most - image.shape[across])
        padding[axis] = (0, _RULE if image is not images[-1] else 0)
        parts.append(np.pad(image, padding, constant_values=255))
    return np.ascontiguousarray(np.concatenate(parts, axis=axis))
