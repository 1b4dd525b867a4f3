"""Time of the rectified flow: how it is shifted towards noise for large latents.

Time 0 is data, 1 is noise. More pixels need more noise before nothing of a clip can be seen, so both training and
sampling move their times by `t -> alpha * t / (1 + (alpha - 1) * t)` (Esser et al. 2024, arXiv:2403.03206, 5.3.2).
"""

from __future__ import annotations

import math

from torch import Tensor

# alpha of a frame is linear in its tokens: 1 at 256, 3 at 4096.
_LOW, _HIGH = (256, 1.0), (4096, 3.0)


def shift_of_tokens(tokens: int, low: tuple[float, float] = _LOW, high: tuple[float, float] = _HIGH) -> float:
    """alpha of one frame with so many tokens, by the line through two points (tokens, alpha), without bounds."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return slope * tokens + low[1] - slope * low[0]


def shift_alpha(frames: int, rows: int, columns: int, patch_size: int) -> float:
    """alpha of a latent of so many frames, rows and columns: that of its frame's tokens, times the root of frames.

    The true patch size counts. (Open-Sora takes a patch of 2 in training whatever the model's is.)
    """
    return shift_of_tokens(rows * columns // patch_size**2) * math.sqrt(frames)


def shift_time(times: Tensor, alpha: float) -> Tensor:
    """Times in [0, 1], shifted; the ends stay where they are. alpha must be above 0."""
    return alpha * times / (1 + (alpha - 1) * times)
