"""From a decoded frame to 8-bit RGB."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_DEEP_PLANAR = re.compile(r"(yuva?4\d\dp|gbra?p|gray|ya)(?:9|1\d)(?:le|be)")
_DEEP_SEMIPLANAR = re.compile(r"p([024])1\d(?:le|be)")


def eight_bit_format(name: str) -> str | None:
    """FFmpeg's 8-bit format with the same planes as a deeper one, or None when `name` is not such a deeper one."""
    planar = _DEEP_PLANAR.fullmatch(name)
    if planar is not None:
        return {"gray": "gray", "ya": "ya8"}.get(planar[1], planar[1])
    semiplanar = _DEEP_SEMIPLANAR.fullmatch(name)
    return None if semiplanar is None else {"0": "yuv420p", "2": "yuv422p", "4": "yuv444p"}[semiplanar[1]]


def rgb_of(frame: VideoFrame) -> NDArray[np.uint8]:
    """`[H, W, 3]` uint8 RGB as coded.

    Deeper formats lose their depth first, plane by plane. FFmpeg's direct way to RGB also spreads the colour planes
    differently, so that the same film in 8 and in 10 bits would differ by up to 64 levels along coloured edges.
    """
    flat = eight_bit_format(frame.format.name)
    if flat is not None:
        frame = frame.reformat(format=flat)
    return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
