"""Structural similarity (Wang, Bovik, Sheikh, Simoncelli 2004) of the frames of clips."""

from __future__ import annotations

from math import exp

import torch
import torch.nn.functional as F

from osora_cli.metrics.clips import as_pair, check_range

WINDOW = 11
SIGMA = 1.5
MARGIN = (WINDOW - 1) // 2
K1 = 0.01
K2 = 0.03

_CACHED = 2**20  # elements


def _gaussian() -> list[float]:
    """Weights of the window along one axis, sum 1."""
    weights = [exp(-((i - MARGIN) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]
    total = sum(weights)
    return [w / total for w in weights]


def _weighted_sum(planes: torch.Tensor, axis: int) -> torch.Tensor:
    """Correlate one axis with the Gaussian; it gets `2 * MARGIN` shorter."""
    length = planes.shape[axis] - 2 * MARGIN
    weights = _gaussian()
    out = planes.narrow(axis, 0, length) * weights[0]
    for i in range(1, WINDOW):
        out.add_(planes.narrow(axis, i, length), alpha=weights[i])
    return out


def _blur(planes: torch.Tensor) -> torch.Tensor:
    """Gaussian means of planes `[N, H + 2 * MARGIN, W + 2 * MARGIN]` -> `[N, H, W]`.

    The window is separable: 22 products a pixel in place of 121. Sums of shifted planes, a few planes at a time so
    that they stay in the cache, are several times faster than conv2d in float64 on a CPU.
    """
    few = max(1, _CACHED // (planes.shape[-2] * planes.shape[-1]))
    return torch.cat([_weighted_sum(_weighted_sum(part, -2), -1) for part in torch.split(planes, few)])


def _frame_map(a: torch.Tensor, b: torch.Tensor, data_range: float) -> torch.Tensor:
    """Local SSIM of frames `[N, C, H, W]` float64 at each pixel, same shape."""
    n, c, h, w = a.shape
    a, b = (F.pad(x, (MARGIN,) * 4, mode="reflect") for x in (a, b))
    moments = _blur(torch.stack((a, b, a * a, b * b, a * b)).flatten(0, 2)).reshape(5, n, c, h, w)
    mean_a, mean_b, square_a, square_b, product = moments
    variance_a = (square_a - mean_a**2).clamp_min(0)
    variance_b = (square_b - mean_b**2).clamp_min(0)
    covariance = product - mean_a * mean_b
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return luminance * structure


def frame_ssim(a: torch.Tensor, b: torch.Tensor, data_range: float) -> torch.Tensor:
    """SSIM of each frame: Gaussian window 11 x 11 with sigma 1.5, K1 0.01, K2 0.03, mean over channels and pixels.

    Frames are continued by reflection at their edges, so every pixel counts (as torchmetrics does; the paper's own
    code leaves the margin out). Computed in float64: the variances are differences of nearly equal numbers.

    Args:
        a, b: `[B, C, T, H, W]` or `[T, C, H, W]` float, same shape.
        data_range: 1 for values in [0, 1], 2 for [-1, 1].

    Returns:
        `[B, T]` float64; `nan` for frames with an edge of 5 pixels or less, which the window does not fit.
    """
    a, b = as_pair(a, b)
    check_range(data_range)
    batch, _, frames, height, width = a.shape
    if min(height, width) <= MARGIN:
        return torch.full((batch, frames), float("nan"), dtype=torch.float64, device=a.device)
    # One frame of each clip at a time keeps the five moment maps small.
    maps = [_frame_map(a[:, :, t].double(), b[:, :, t].double(), data_range) for t in range(frames)]
    return torch.stack([m.mean((1, 2, 3)) for m in maps], dim=1)


def ssim(a: torch.Tensor, b: torch.Tensor, data_range: float) -> torch.Tensor:
    """Mean SSIM over the frames of each clip, `[B]` float64. Arguments and errors as `frame_ssim`."""
    return frame_ssim(a, b, data_range).mean(dim=1)
