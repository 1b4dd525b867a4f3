"""Peak signal-to-noise ratio of clips."""

from __future__ import annotations

import torch

from osora_cli.metrics.clips import as_pair, check_range


def frame_mse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each frame, in float64.

    Frames have equal weight, so parts of a long clip can be scored one after the other and averaged by frames.

    Args:
        a, b: `[B, C, T, H, W]` or `[T, C, H, W]` float, same shape.

    Returns:
        `[B, T]` float64 on the inputs' device.
    """
    a, b = as_pair(a, b)
    # Frame by frame: float64 copies of a whole clip of 720p would take gigabytes.
    frames = [(a[:, :, t].double() - b[:, :, t].double()).square().mean((1, 2, 3)) for t in range(a.shape[2])]
    return torch.stack(frames, dim=1)


def psnr_from_mse(mse: torch.Tensor, data_range: float) -> torch.Tensor:
    """`10 log10(data_range^2 / mse)` in dB, elementwise; infinite where `mse` is 0."""
    return 10.0 * torch.log10(check_range(data_range) ** 2 / mse)


def psnr(a: torch.Tensor, b: torch.Tensor, data_range: float) -> torch.Tensor:
    """PSNR of each clip in dB, from the squared error averaged over all its frames, channels and pixels.

    (Not the mean of the frames' PSNRs, which a single perfect frame makes infinite.)

    Args:
        a, b: `[B, C, T, H, W]` or `[T, C, H, W]` float, same shape; symmetric in both.
        data_range: largest less smallest possible value: 1 for [0, 1], 2 for [-1, 1].

    Returns:
        `[B]` float64 (`[1]` for a 4-D input); `inf` for identical clips, `nan` where a value is not a number.

    Raises:
        ValueError: shapes differ, not float, or `data_range` not positive.
    """
    check_range(data_range)
    return psnr_from_mse(frame_mse(a, b).mean(dim=1), data_range)
