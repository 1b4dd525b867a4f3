"""Writing videos: H.264 that any player opens, or lossless RGB."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def write_video(
    path: str | os.PathLike[str], frames: NDArray[np.uint8], fps: float | Fraction, lossless: bool = False
) -> None:
    """Writes frames `[T, H, W, 3]` uint8 RGB as one video of exactly that size and number of frames.

    Args:
        path: the file; its extension chooses the container (.mp4, .mov or .mkv).
        frames: any height and width from 1, odd ones too.
        fps: frames per second; 23.976 and its like are written as the broadcast fraction they stand for.
        lossless: keep every RGB value.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.shape[0] == 0:
        raise ValueError(f"frames must be uint8 [T, H, W, 3] with T >= 1, got {frames.dtype} {list(frames.shape)}")
    height, width = frames.shape[1:3]
    even = height % 2 == 0 and width % 2 == 0
    with av.open(os.fspath(Path(path).absolute()), "w") as container:
        stream = container.add_stream("libx264rgb" if lossless else "libx264", rate=_rate(fps))
        stream.height, stream.width = height, width
        stream.pix_fmt = "rgb24" if lossless else "yuv420p" if even else "yuv444p"
        stream.options = {"crf": "0" if lossless else "12", "preset": "veryfast"}
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode(None))


def _rate(fps: float | Fraction) -> Fraction:
    """The fraction that a decimal rate stands for: 29.97 is 30000/1001."""
    exact = Fraction(fps)
    if exact.denominator in (1, 1001):
        return exact
    broadcast = Fraction(round(exact * 1001 / 1000) * 1000, 1001)
    if round(float(broadcast), 2) == round(float(exact), 2):
        return broadcast
    return exact.limit_denominator(1001)
