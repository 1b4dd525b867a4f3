"""What becomes of one clip: its two videos, its scores, and its frames in the picture, as its parts come in."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from osora_cli.app.picture import ShownClip
from osora_cli.app.recon_input import ClipPlan
from osora_cli.data.media import VideoWriter
from osora_cli.errors import RunError
from osora_cli.metrics.baseline import block_mean_psnr
from osora_cli.metrics.psnr import frame_mse, psnr_from_mse
from osora_cli.metrics.ssim import frame_ssim
from osora_cli.metrics.temporal import frame_flicker
from osora_cli.model.perceptual import LPIPS, MIN_SIZE

DATA_RANGE = 1.0
SHOWN_FRAMES = 4
_DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class ClipScore:
    """One clip's numbers. Paths are below the output folder; None where a number is not defined.

    Attributes:
        frames: in the reconstruction, as many as in the original.
        height, width: pixels, of both.
        fps: of both videos; None for a still.
        psnr: dB; ssim: up to 1; flicker: in units of [0, 1] (metrics/).
        lpips: 0 for equal frames; None too where it was not asked for (model/perceptual.py).
        constant_colour_psnr: dB, of the best constant colour.
        block_mean_psnr: dB, of block means with `block_numbers` numbers, for the latent's `latent_numbers`.
    """

    name: str
    row: int
    path: str
    orig: str
    recn: str
    frames: int
    height: int
    width: int
    fps: float | None
    psnr: float
    ssim: float | None
    lpips: float | None
    flicker: float | None
    constant_colour_psnr: float
    block_mean_psnr: float
    block_numbers: int
    latent_numbers: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Sums:
    """Scores of a clip whose parts come one after the other. Each list holds one number a frame, or a part."""

    mse: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)
    flicker: list[float] = field(default_factory=list)
    block_mse: list[float] = field(default_factory=list)
    part_frames: list[int] = field(default_factory=list)
    block_numbers: int = 0
    latent_numbers: int = 0
    colour: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 3, dtype=torch.float64))
    last: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, original: torch.Tensor, rebuilt: torch.Tensor, lpips: LPIPS | None) -> None:
        """Frames `[T, 3, H, W]` in [0, 1] that follow those added before."""
        self.mse += frame_mse(original, rebuilt)[0].tolist()
        self.ssim += frame_ssim(original, rebuilt, DATA_RANGE)[0].tolist()
        if lpips is not None:
            self.lpips += frame_lpips(lpips, original, rebuilt).tolist()
        exact = original.double()
        self.colour += torch.stack([exact.mean((2, 3)).sum(0), exact.square().mean((2, 3)).sum(0)]).cpu()
        if self.last is not None:
            original, rebuilt = torch.cat([self.last[0], original]), torch.cat([self.last[1], rebuilt])
        self.flicker += frame_flicker(original, rebuilt)[0].tolist()
        self.last = original[-1:].clone(), rebuilt[-1:].clone()

    def add_baseline(self, original: torch.Tensor, latent_shape: tuple[int, ...], kept: int) -> None:
        """What block means make of a part `[T, 3, H, W]` as it was coded; `kept` of its frames are new ones."""
        (found,) = block_mean_psnr(original, latent_shape, DATA_RANGE)
        self.block_mse.append(DATA_RANGE**2 / 10 ** (found.psnr / 10))
        self.part_frames.append(kept)
        self.block_numbers += found.numbers
        self.latent_numbers += math.prod(latent_shape)

    def constant_colour_psnr(self) -> float:
        mean, square = self.colour / len(self.mse)
        mse = (square - mean**2).clamp_min(0).mean()
        return float(psnr_from_mse(torch.where(mse > 1e-12, mse, 0.0), DATA_RANGE))

    def block_mean_psnr(self) -> float:
        mse = np.average(self.block_mse, weights=self.part_frames)
        return float(psnr_from_mse(torch.tensor(mse, dtype=torch.float64), DATA_RANGE))


@torch.inference_mode()
def frame_lpips(lpips: LPIPS, original: torch.Tensor, rebuilt: torch.Tensor) -> torch.Tensor:
    """LPIPS of each frame `[T]`, from frames `[T, 3, H, W]` in [0, 1] on the net's device.

    Without TF32, which torch's convolutions use on a GPU unless told otherwise: fp32 as on a CPU.

    Raises:
        RunError: the GPU has too little memory.
    """
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            distances: torch.Tensor = lpips(original * 2 - 1, rebuilt * 2 - 1)
            return distances.flatten()
    except torch.cuda.OutOfMemoryError as error:
        height, width = rebuilt.shape[-2:]
        raise RunError(
            f"the GPU has too little memory for LPIPS of frames of {width}x{height} px",
            hint="`--no-lpips`, or a smaller `bucket_config`",
        ) from error


class ClipSink:
    """Takes a clip's parts in order, and when the last is there puts its files in place.

    Files are written under names with a leading dot and renamed at the end, so that a run that ends early leaves no
    half video under a clip's name.

    Args:
        plan: the clip.
        folder: the output folder, with orig/ and recn/ in it.
        shown: whether frames are kept for the picture.
        lpips: LPIPS, on the device of the reconstructions; None: the clip gets no LPIPS.
    """

    def __init__(self, plan: ClipPlan, folder: Path, shown: bool, lpips: LPIPS | None = None) -> None:
        self.plan = plan
        self._lpips = lpips if min(plan.size) >= MIN_SIZE else None
        self.picture = ShownClip(plan.name) if shown else None
        self._folder = folder
        self._sums = _Sums()
        self._shown = set(np.linspace(0, len(plan) - 1, min(SHOWN_FRAMES, len(plan))).round().astype(int).tolist())
        self._ending = ".png" if plan.still else ".mp4"
        fps = plan.fps if math.isfinite(plan.fps) and plan.fps > 0 else _DEFAULT_FPS
        self._fps = None if plan.still else fps
        self._writers: dict[str, VideoWriter] = {}
        if not plan.still:
            self._writers = {side: VideoWriter(self._temporary(side), plan.size, fps) for side in ("orig", "recn")}

    @property
    def done(self) -> int:
        """Frames that have come in."""
        return len(self._sums.mse)

    def add(self, original: torch.Tensor, rebuilt: torch.Tensor, latent_shape: tuple[int, ...], skip: int) -> None:
        """A part as it was coded; its first `skip` frames have come in before.

        Args:
            original: uint8 `[T, 3, H, W]`.
            rebuilt: float `[T, 3, H, W]` in [-1, 1], perhaps beyond; its device is where scores are computed.
            latent_shape: `[C, t, h, w]` of the part's latent.
        """
        given = original.to(rebuilt.device).float() / 255
        # Clamped, but not rounded to 8 bits: what the net made, not what a file can hold.
        clamped = ((rebuilt.float() + 1) / 2).clamp(0, 1)
        self._sums.add_baseline(given, latent_shape, len(given) - skip)
        self._sums.add(given[skip:], clamped[skip:], self._lpips)
        rounded = (clamped[skip:].nan_to_num(0) * 255).round().to(torch.uint8).cpu()
        self._write(_pixels(original[skip:]), _pixels(rounded))

    def finish(self) -> ClipScore:
        """Put the files in place. Only when all frames have come in."""
        if self.done != len(self.plan):
            raise RuntimeError(f"`{self.plan.path}`: {self.done} of {len(self.plan)} frames have come in")
        for side in ("orig", "recn"):
            self._close(side)
        for side in ("orig", "recn"):
            self._temporary(side).replace(self._folder / self._place(side))
        score = self._score()
        if self.picture is not None:
            ssim = "" if score.ssim is None else f", SSIM {score.ssim:.4f}"
            lpips = "" if score.lpips is None else f", LPIPS {score.lpips:.4f}"
            self.picture.title = f"{self.plan.name}: PSNR {score.psnr:.2f} dB{ssim}{lpips}"
        return score

    def abort(self) -> None:
        """Give the clip up and remove its unfinished files."""
        for side in ("orig", "recn"):
            with suppress(Exception):  # an encoder that was given nothing, or a full disk: the file goes anyway
                self._close(side)
            self._temporary(side).unlink(missing_ok=True)

    def _score(self) -> ClipScore:
        plan, sums = self.plan, self._sums
        return ClipScore(
            name=plan.name,
            row=plan.row,
            path=plan.path,
            orig=self._place("orig"),
            recn=self._place("recn"),
            frames=self.done,
            height=plan.size[0],
            width=plan.size[1],
            fps=self._fps,
            psnr=float(psnr_from_mse(torch.tensor(sums.mse, dtype=torch.float64).mean(), DATA_RANGE)),
            ssim=_mean(sums.ssim, undefined=min(plan.size) <= 5),
            lpips=_mean(sums.lpips, undefined=self._lpips is None),
            flicker=_mean(sums.flicker, undefined=not sums.flicker),
            constant_colour_psnr=sums.constant_colour_psnr(),
            block_mean_psnr=sums.block_mean_psnr(),
            block_numbers=sums.block_numbers,
            latent_numbers=sums.latent_numbers,
        )

    def _write(self, original: NDArray[np.uint8], rebuilt: NDArray[np.uint8]) -> None:
        first = self.done - len(original)
        for side, pixels in (("orig", original), ("recn", rebuilt)):
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
        return self._folder / side / f".{self.plan.name}.tmp{self._ending}"


def _pixels(frames: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 `[T, 3, H, W]` -> `[T, H, W, 3]`."""
    return frames.permute(0, 2, 3, 1).contiguous().numpy()


def _mean(values: list[float], undefined: bool) -> float | None:
    return None if undefined else float(np.mean(values))
