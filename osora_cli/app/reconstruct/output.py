"""What becomes of one clip: its videos, its scores, and its frames in the picture, as its parts come in."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from osora_cli.app.picture import ShownClip
from osora_cli.app.reconstruct.clips import ClipPlan
from osora_cli.app.reconstruct.scores import DATA_RANGE, ClipScore, ScoreSums, mean_or_none
from osora_cli.data.media import VideoWriter
from osora_cli.metrics.psnr import psnr_from_mse
from osora_cli.model.perceptual import LPIPS, MIN_SIZE

SHOWN_FRAMES = 4
ORIG, RECN, PAIR = "orig", "recn", "side_by_side"  # folders of videos
_DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class Files:
    """Which files are written, and how.

    Attributes:
        folder: the output folder, with a folder for each of `sides` in it.
        sides: ORIG, RECN and perhaps PAIR.
        lossless: keep every RGB value.
    """

    folder: Path
    sides: tuple[str, ...] = (ORIG, RECN, PAIR)
    lossless: bool = False


class ClipSink:
    """Takes a clip's parts in order, and when the last is there puts its files in place.

    Files are written under names with a leading dot and renamed at the end, so that a run that ends early leaves no
    half video under a clip's name.

    Args:
        plan: the clip.
        files: where to.
        periods: frames and pixels after which the net's up-sampling repeats.
        shown: whether frames are kept for the picture.
        lpips: LPIPS, on the device of the reconstructions; None: the clip gets no LPIPS.
    """

    def __init__(
        self, plan: ClipPlan, files: Files, periods: tuple[int, int], shown: bool, lpips: LPIPS | None = None
    ) -> None:
        self.plan = plan
        self._lpips = lpips if min(plan.size) >= MIN_SIZE else None
        self.picture = ShownClip(plan.name) if shown else None
        self._files = files
        self._sums = ScoreSums(periods)
        self._shown = set(np.linspace(0, len(plan) - 1, min(SHOWN_FRAMES, len(plan))).round().astype(int).tolist())
        self._ending = ".png" if plan.still else ".mp4"
        fps = plan.fps if math.isfinite(plan.fps) and plan.fps > 0 else _DEFAULT_FPS
        self._fps = None if plan.still else fps
        self._writers: dict[str, VideoWriter] = {}
        if not plan.still:
            height, width = plan.size
            for side in files.sides:
                size = (height, 2 * width) if side == PAIR else plan.size
                self._writers[side] = VideoWriter(self._temporary(side), size, fps, files.lossless)

    @property
    def done(self) -> int:
        """Frames that have come in."""
        return len(self._sums.mse)

    def add(
        self, original: torch.Tensor, rebuilt: torch.Tensor, latent_shape: tuple[int, ...], skip: int, lead: int = 0
    ) -> None:
        """A part as it was coded; its first `skip` frames have come in before, and its first `lead` have a latent frame
        of their own.

        Args:
            original: uint8 `[T, 3, H, W]`.
            rebuilt: float `[T, 3, H, W]` in [-1, 1], perhaps beyond; its device is where scores are computed.
            latent_shape: `[C, t, h, w]` of the part's latent.
        """
        given = original.to(rebuilt.device).float() / 255
        # Clamped, but not rounded to 8 bits: what the net made, not what a file can hold.
        clamped = ((rebuilt.float() + 1) / 2).clamp(0, 1)
        self._sums.add_baseline(given, latent_shape, len(given) - skip)
        self._sums.add_grid(clamped - given, skip, lead)
        self._sums.add(given[skip:], clamped[skip:], self._lpips)
        rounded = (clamped[skip:].nan_to_num(0) * 255).round().to(torch.uint8).cpu()
        self._write(_pixels(original[skip:]), _pixels(rounded))

    def finish(self) -> ClipScore:
        """Put the files in place. Only when all frames have come in."""
        if self.done != len(self.plan):
            raise RuntimeError(f"`{self.plan.path}`: {self.done} of {len(self.plan)} frames have come in")
        for side in self._files.sides:
            self._close(side)
        for side in self._files.sides:
            self._temporary(side).replace(self._files.folder / self._place(side))
        score = self._score()
        if self.picture is not None:
            ssim = "" if score.ssim is None else f", SSIM {score.ssim:.4f}"
            lpips = "" if score.lpips is None else f", LPIPS {score.lpips:.4f}"
            self.picture.title = f"{self.plan.name}: PSNR {score.psnr:.2f} dB{ssim}{lpips}"
        return score

    def abort(self) -> None:
        """Give the clip up and remove its unfinished files."""
        for side in self._files.sides:
            with suppress(Exception):  # an encoder that was given nothing, or a full disk: the file goes anyway
                self._close(side)
            self._temporary(side).unlink(missing_ok=True)

    def _score(self) -> ClipScore:
        plan, sums = self.plan, self._sums
        return ClipScore(
            name=plan.name,
            row=plan.row,
            path=plan.path,
            orig=self._place(ORIG),
            recn=self._place(RECN),
            side_by_side=self._place(PAIR) if PAIR in self._files.sides else None,
            frames=self.done,
            height=plan.size[0],
            width=plan.size[1],
            fps=self._fps,
            psnr=float(psnr_from_mse(torch.tensor(sums.mse, dtype=torch.float64).mean(), DATA_RANGE)),
            ssim=mean_or_none(sums.ssim, undefined=min(plan.size) <= 5),
            lpips=mean_or_none(sums.lpips, undefined=self._lpips is None),
            flicker=mean_or_none(sums.flicker, undefined=not sums.flicker),
            checkerboard_space=sums.grid_space.share,
            checkerboard_space_ratio=sums.grid_space.ratio,
            checkerboard_time=sums.grid_time.share,
            checkerboard_time_ratio=sums.grid_time.ratio,
            constant_colour_psnr=sums.constant_colour_psnr(),
            block_mean_psnr=sums.block_mean_psnr(),
            block_numbers=sums.block_numbers,
            latent_numbers=sums.latent_numbers,
        )

    def _write(self, original: NDArray[np.uint8], rebuilt: NDArray[np.uint8]) -> None:
        first = self.done - len(original)
        pictures = {ORIG: original, RECN: rebuilt}
        if PAIR in self._files.sides:
            pictures[PAIR] = np.concatenate([original, rebuilt], axis=2)
        for side, pixels in pictures.items():
            if self.plan.still:
                Image.fromarray(pixels[0]).save(self._temporary(side))
            else:
                self._writers[side].write(pixels)
        if self.picture is not None:
            for i, (one, other) in enumerate(zip(original, rebuilt, strict=True), start=first):
                if i in self._shown:
                    self.picture.frames.append((i, one.copy(), other.copy()))

    def _close(self, side: str) -> None:
        if side in self._writers:
            self._writers.pop(side).close()

    def _place(self, side: str) -> str:
        return f"{side}/{self.plan.name}{self._ending}"

    def _temporary(self, side: str) -> Path:
        return self._files.folder / side / f".{self.plan.name}.tmp{self._ending}"


def _pixels(frames: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 `[T, 3, H, W]` -> `[T, H, W, 3]`."""
    return frames.permute(0, 2, 3, 1).contiguous().numpy()
