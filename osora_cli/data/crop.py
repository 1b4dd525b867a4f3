"""Which frames of a clip are used."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from osora_cli.errors import DataError


def draw_frame_indices(total: int, frames: int, interval: int, rng: random.Random) -> NDArray[np.int64]:
    """Indices of `frames` frames from a window of `frames * interval` frames at a drawn start.

    The window starts at a uniform draw from 0 to max(0, total - frames * interval - 1), both included, and is cut at
    the clip's end; the indices are spread evenly over it, both ends included, and truncated. So the step is close to
    `interval` but not always equal to it, and a clip shorter than its window is still used while it has `frames`
    frames. Rule: algorithms, part 3. Exactly one number is drawn, whatever the lengths.

    Args:
        total: frames of the clip.
        frames: frames wanted, at least 1.
        interval: every how many frames one is used, at least 1.
        rng: where the start is drawn from.

    Returns:
        int64 [frames], not decreasing, each in [0, total).

    Raises:
        DataError: the clip has fewer than `frames` frames.
    """
    window = frames * interval
    start = rng.randint(0, max(0, total - window - 1))
    end = min(start + window, total)
    if end - start < frames:
        raise DataError(f"the clip has {total} frames, {frames} are needed")
    return np.linspace(start, end - 1, frames, dtype=np.int64)


def draw_interval(total: int, frames: int, longest: int, rng: random.Random) -> int:
    """A frame interval drawn uniformly from 1 to `longest`, or to what the clip's length allows if that is less."""
    return rng.randint(1, max(1, min(total // frames, longest)))
