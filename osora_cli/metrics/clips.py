"""What all metrics ask of their inputs: float clips of one shape, and a stated data range."""

from __future__ import annotations

import math

import torch


def as_clips(video: torch.Tensor) -> torch.Tensor:
    """View `[B, C, T, H, W]` as it is, or one clip `[T, C, H, W]` as `[1, C, T, H, W]`.

    Raises:
        ValueError: another number of axes, an integer dtype (differences of uint8 would wrap), or an empty axis.
    """
    if not video.is_floating_point():
        raise ValueError(f"metrics need float tensors with a stated data range, got {video.dtype}")
    if video.dim() == 4:
        video = video.permute(1, 0, 2, 3).unsqueeze(0)
    if video.dim() != 5:
        raise ValueError(f"expected `[B, C, T, H, W]` or `[T, C, H, W]`, got shape {tuple(video.shape)}")
    if 0 in video.shape:
        raise ValueError(f"a clip without elements has no metric, got shape {tuple(video.shape)}")
    return video


def as_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as `[B, C, T, H, W]`; raises ValueError where their shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f"the two videos differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
    return as_clips(a), as_clips(b)


def check_range(data_range: float) -> float:
    """The largest possible value less the smallest: 1 for [0, 1], 2 for [-1, 1]. ValueError unless positive."""
    if not (math.isfinite(data_range) and data_range > 0):
        raise ValueError(f"data range `{data_range}` is not a positive number")
    return float(data_range)
