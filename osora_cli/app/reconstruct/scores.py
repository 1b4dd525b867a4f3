"""The numbers of one clip, summed as its parts come in."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from osora_cli.errors import RunError
from osora_cli.metrics.baseline import block_mean_psnr
from osora_cli.metrics.checkerboard import GridEnergy, grid_energy, space_energy
from osora_cli.metrics.psnr import frame_mse, psnr_from_mse
from osora_cli.metrics.ssim import frame_ssim
from osora_cli.metrics.temporal import frame_flicker
from osora_cli.model.perceptual import LPIPS

DATA_RANGE = 1.0


@dataclass(frozen=True)
class ClipScore:
    """One clip's numbers. Paths are below the output folder; None where a number is not defined.

    Attributes:
        side_by_side: original left, reconstruction right; None where it was not asked for.
        frames: in the reconstruction, as many as in the original.
        height, width: pixels, of both.
        fps: of both videos; None for a still.
        psnr: dB; ssim: up to 1; flicker: in units of [0, 1] (metrics/).
        lpips: 0 for equal frames; None too where it was not asked for (model/perceptual.py).
        checkerboard_space, checkerboard_time: share of the error's energy that repeats with the net's up-sampling
            period; checkerboard_space_ratio, checkerboard_time_ratio: that energy against what is beside it in the
            spectrum, 1 where nothing repeats (metrics/checkerboard.py). None where the clip has less than two periods.
        constant_colour_psnr: dB, of the best constant colour.
        block_mean_psnr: dB, of block means with `block_numbers` numbers, for the latent's `latent_numbers`.
    """

    name: str
    row: int
    path: str
    orig: str
    recn: str
    side_by_side: str | None
    frames: int
    height: int
    width: int
    fps: float | None
    psnr: float
    ssim: float | None
    lpips: float | None
    flicker: float | None
    checkerboard_space: float | None
    checkerboard_space_ratio: float | None
    checkerboard_time: float | None
    checkerboard_time_ratio: float | None
    constant_colour_psnr: float
    block_mean_psnr: float
    block_numbers: int
    latent_numbers: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class ScoreSums:
    """Scores of a clip whose parts come one after the other. Each list holds one number a frame, or a part.

    Attributes:
        periods: frames and pixels after which the net's up-sampling repeats.
    """

    periods: tuple[int, int] = (1, 1)
    mse: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)
    flicker: list[float] = field(default_factory=list)
    block_mse: list[float] = field(default_factory=list)
    part_frames: list[int] = field(default_factory=list)
    block_numbers: int = 0
    latent_numbers: int = 0
    grid_space: GridEnergy = field(default_factory=GridEnergy)
    grid_time: GridEnergy = field(default_factory=GridEnergy)
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

    def add_grid(self, error: torch.Tensor, skip: int, lead: int) -> None:
        """The error of a part as it was coded, `[T, 3, H, W]`; `skip` of its frames came before, periods of time begin
        after `lead` of them."""
        self.grid_space += space_energy(error[skip:], self.periods[1])
        if len(error) > lead:
            self.grid_time += grid_energy(error[lead:], 0, self.periods[0])

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


def mean_or_none(values: list[float], undefined: bool) -> float | None:
    return None if undefined else float(np.mean(values))
