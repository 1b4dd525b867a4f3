"""Frame rate to frame interval, and what of it stands in a caption."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# From this limit on the rate is not bounded at all, and captions do not name it.
UNBOUNDED_FPS = 999.0


def map_target_fps(fps: float, fps_max: float | None) -> tuple[float, int]:
    """Rate and frame interval at which a clip is used when at most `fps_max` frames a second are wanted.

    A clip below the limit is used as it is. Any other is thinned to every k-th frame with k = ceil(fps / fps_max), and
    its new rate is floor(fps / k), an int. A rate that is not finite (a still has NaN) gives `(0, 1)`.

    Args:
        fps: frames a second of the file.
        fps_max: largest rate wanted, above 0; None: no limit.

    Returns:
        `(new rate, interval)`. Rule: algorithms, part 2.
    """
    if not math.isfinite(fps):
        return 0, 1
    if fps_max is None or fps < fps_max:
        return fps, 1
    interval = math.ceil(fps / fps_max)
    return math.floor(fps / interval), interval


def frame_intervals(fps: NDArray[np.float64], fps_max: float | None) -> NDArray[np.int64]:
    """The interval of `map_target_fps` for many clips at once, int64 [N]."""
    interval = np.ones(fps.shape, dtype=np.int64)
    if fps_max is not None:
        with np.errstate(invalid="ignore"):
            fast = np.isfinite(fps) & (fps >= fps_max)
        interval[fast] = np.ceil(fps[fast] / fps_max).astype(np.int64)
    return interval


def add_caption_suffix(text: str, new_fps: float, fps_max: float | None, motion_score: float | None = None) -> str:
    """The caption a model is trained on: `text`, then rate and motion where they are known.

    The rate is printed as `map_target_fps` returns it (`12 FPS`, but `23.976 FPS` for a clip that was not thinned), and
    left out for stills and when the rate is unbounded; the motion score is rounded half up. Without either the caption
    is `text` itself.
    """
    parts = []
    if new_fps != 0 and fps_max is not None and fps_max < UNBOUNDED_FPS:
        parts.append(f"{new_fps} FPS")
    if motion_score is not None and not math.isnan(motion_score):
        parts.append(f"{int(motion_score + 0.5)} motion score")
    return f"{text} {', '.join(parts)}." if parts else text
