"""What an autoencoder is scored on while it trains: fixed clips, its weights and their average."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from osora_cli.app.data.eval_clips import draw_eval_clips, eval_frames
from osora_cli.app.picture import ShownClip, sheet
from osora_cli.config.models.dc_ae import check_clip, compression
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.data.fixed_clips import FixedClip, read_fixed_clips
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import Engine
from osora_cli.errors import SetupError
from osora_cli.metrics.baseline import block_mean_psnr, constant_colour_psnr
from osora_cli.metrics.psnr import psnr
from osora_cli.metrics.ssim import ssim
from osora_cli.model.lpips_weights import FETCH_COMMAND, load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS, MIN_SIZE
from osora_cli.trainer import rng
from osora_cli.trainer.evaluation import Evaluation, evaluation_mode
from osora_cli.trainer.saving import RunState
from osora_cli.words import counted

PICTURE = "clips"
DATA_RANGE = 1.0
SHOWN_FRAMES = 4


@dataclass(frozen=True)
class EvalInput:
    """The checked input of an evaluation: clips that are not read yet, and LPIPS on the CPU where it is scored."""

    clips: list[FixedClip]
    lpips: LPIPS | None
    notes: list[str] = field(default_factory=list)


def check_eval_input(config: TrainVaeConfig, training_table: ClipTable) -> EvalInput | None:
    """Draw the clips; None where nothing is to be scored.

    Raises:
        ConfigError: sizes or rows that cannot be.
        DataError: no clip fits, or the held-out table cannot be used.
        SetupError: LPIPS is asked for and its weights are not on this machine.
    """
    if config.eval_every == 0:
        return None
    spatial = compression(config.model)[1]
    check_clip(config.model, eval_frames(config), spatial, spatial)
    drawn = draw_eval_clips(config, training_table, spatial)
    clips, notes = drawn.clips, drawn.notes
    files = len({clip.file for clip in clips})
    plural = "clip" if files == 1 else "clips"
    own = f"{plural} trained on as well: name held-out ones with `--eval.table`"
    whose = f"held-out {plural}" if drawn.held_out else own
    notes.append(
        f"scored every {config.eval_every} updates on {counted(len(clips), 'window')} of {drawn.frames} frames, "
        f"{files} {whose}"
    )
    large = min(min(clip.size) for clip in clips) >= MIN_SIZE
    return EvalInput(clips, _find_lpips(config.eval.lpips, notes) if large else None, notes)


def _find_lpips(wanted: bool | None, notes: list[str]) -> LPIPS | None:
    """LPIPS on the CPU, in fp32; None where it is not wanted, or is not asked for and cannot be had."""
    if wanted is False:
        return None
    try:
        return load_lpips(locate_lpips(without="`--eval.lpips false`"))
    except SetupError as error:
        if wanted:
            raise
        notes.append(f"scored without LPIPS: {error.message}; fetch them with `{FETCH_COMMAND}`")
        return None


@dataclass(frozen=True)
class _Batch:
    """Clips scored together: uint8 `[B, 3, T, H, W]`. The clips of `clips` count, others only fill the batch up."""

    video: torch.Tensor
    clips: list[FixedClip]


class VaeEvaluator:
    """PSNR, SSIM and LPIPS of the average (`..._ema`) and of the weights (`..._raw`), mean over the clips.

    Beside them the PSNR of block means with as many numbers as the latent, and of each clip's best constant colour.
    Rank r takes clips r, r + R, ...; all ranks run equally many batches, so that networks that are spread over the
    ranks can be called. The clips are read here, once.

    Raises:
        DataError: a clip cannot be read.
    """

    def __init__(self, config: TrainVaeConfig, given: EvalInput, engine: Engine, state: RunState) -> None:
        self.every = config.eval_every
        self._engine, self._state = engine, state
        self._raw_too, self._pictures = config.eval.raw_weights, config.eval.pictures
        self._lpips = given.lpips.to(engine.device) if given.lpips is not None else None
        # Two at least on the CPU: its kernels split the work over the batch.
        least = 2 if engine.device.type == "cpu" else 1
        size = max(config.eval.batch_size, least)
        self._batches = _share(given.clips, engine.rank, engine.world_size, size, least)

    def evaluate(self, update: int) -> Evaluation:
        started = time.perf_counter()
        network, ema = self._state.task.networks["model"], self._state.ema
        scores: dict[str, float] = {}
        shown: list[ShownClip] = []
        kept = rng.capture()
        try:
            with evaluation_mode(network.module):
                if ema is not None:
                    with ema.swapped(network):
                        scores |= self._score("ema", shown)
                if ema is None or self._raw_too:
                    scores |= self._score("raw", shown if ema is None else [])
        finally:
            rng.restore(kept)
        scores["time_s"] = round(time.perf_counter() - started, 3)
        pictures = {PICTURE: np.asarray(sheet(shown))} if shown else {}
        return Evaluation({name: value for name, value in scores.items() if math.isfinite(value)}, pictures)

    def _score(self, weights: str, shown: list[ShownClip]) -> dict[str, float]:
        """Mean over the clips of all ranks. The first clips of rank 0 are appended to `shown`."""
        names = [f"psnr_{weights}", f"ssim_{weights}", "psnr_block_means", "psnr_constant_colour"]
        names += [f"lpips_{weights}"] if self._lpips is not None else []
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        for batch in self._batches:
            original, rebuilt, latent_shape = self._rebuild(batch)
            for clip, given, made in zip(batch.clips, original, rebuilt, strict=True):
                numbers = self._clip_scores(given[None], made[None], latent_shape)
                sums += torch.tensor([*numbers, 1.0], dtype=torch.float64)
                if self._engine.rank == 0 and len(shown) < self._pictures:
                    shown.append(_shown(clip, given, made, numbers))
        *means, share = self._engine.mean_over_ranks(sums.to(self._engine.device)).tolist()
        return {name: mean / share for name, mean in zip(names, means, strict=True)}

    @torch.no_grad()
    def _rebuild(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """The clips that count and what the network makes of them, `[B, 3, T, H, W]` in [0, 1]; the latent's shape."""
        network, count = self._state.task.networks["model"], len(batch.clips)
        video = normalize(batch.video.to(self._engine.device))
        rebuilt, _, latent = network.module(video.to(network.compute_dtype))
        shape = tuple(latent.shape[1:])
        return (video[:count] + 1) / 2, ((rebuilt[:count].float() + 1) / 2).clamp(0, 1), shape

    def _clip_scores(self, given: torch.Tensor, made: torch.Tensor, latent_shape: tuple[int, ...]) -> list[float]:
        """In the order of the names in `_score`; of clips `[1, 3, T, H, W]` in [0, 1]."""
        (means,) = block_mean_psnr(given, latent_shape, DATA_RANGE)
        numbers = [
            float(psnr(given, made, DATA_RANGE)),
            float(ssim(given, made, DATA_RANGE)),
            means.psnr,
            float(constant_colour_psnr(given, DATA_RANGE)),
        ]
        if self._lpips is not None:
            frames = [clip[0].transpose(0, 1) * 2 - 1 for clip in (given, made)]
            # In fp32 proper on a GPU as well: numbers of one machine can be compared with those of another.
            with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                numbers.append(float(self._lpips(*frames).mean()))
        return numbers


def _share(clips: list[FixedClip], rank: int, ranks: int, size: int, least: int) -> list[_Batch]:
    """This rank's batches, as many as every other rank has: it may repeat one that does not count."""
    plans = [_plan(clips[r::ranks], size) for r in range(ranks)]
    own = [clip for group in plans[rank] for clip in group]
    videos = dict(zip(own, read_fixed_clips(own), strict=True))
    batches = []
    for group in plans[rank]:
        video = torch.stack([videos[clip] for clip in group])
        filled = (
            torch.cat([video, video[-1:].expand(least - len(group), -1, -1, -1, -1)]) if len(group) < least else video
        )
        batches.append(_Batch(filled, group))
    rounds = max(len(plan) for plan in plans)
    if not batches:
        (video,) = read_fixed_clips(clips[:1])
        batches.append(_Batch(video[None].repeat(least, 1, 1, 1, 1), []))
    return batches + [_Batch(batches[-1].video, [])] * (rounds - len(batches))


def _plan(clips: list[FixedClip], size: int) -> list[list[FixedClip]]:
    """Groups of clips of one size, `size` clips at most in each."""
    groups = []
    for _, same in groupby(clips, key=lambda clip: clip.size):
        alike = list(same)
        groups += [alike[i : i + size] for i in range(0, len(alike), size)]
    return groups


def _shown(clip: FixedClip, given: torch.Tensor, made: torch.Tensor, numbers: list[float]) -> ShownClip:
    """A few frames of a clip `[3, T, H, W]` in [0, 1], and of its reconstruction."""
    picture = ShownClip(f"{clip.name}: PSNR {numbers[0]:.2f} dB, SSIM {numbers[1]:.4f}")
    frames = given.shape[1]
    for number in np.linspace(0, frames - 1, min(SHOWN_FRAMES, frames)).round().astype(int).tolist():
        pair = [
            (video[:, number].nan_to_num(0) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
            for video in (given, made)
        ]
        picture.frames.append((number, pair[0], pair[1]))
    return picture
