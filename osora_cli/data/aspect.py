"""Resolution names (`256px`, `720p`, `256px_ar1:1`) and the frame sizes they stand for.

Sizes are (height, width) in pixels, multiples of the autoencoder's spatial compression. An aspect ratio is named
`width:height`; wherever a ratio is a number it is height / width. Rules: algorithms, part 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from osora_cli.errors import ConfigError

Size = tuple[int, int]

# In this order: it decides which of two equally close ratios a clip gets.
RATIO_NAMES = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")

_BASE_NAME = re.compile(r"(\d+)(px|p)")
_ALLOWED = "`256px` (256 x 256 pixels), `720p` (720 x 1280), either with `_max` or one ratio as in `_ar16:9`"


class Resolution(NamedTuple):
    """What a resolution name stands for: its number of pixels, and the size for each aspect ratio, in order."""

    pixels: int
    sizes: Mapping[str, Size]


def ratio_value(name: str) -> float:
    """`"16:9"` (width:height) as height / width."""
    width, height = map(float, name.split(":"))
    return height / width


def _flipped(name: str) -> str:
    return ":".join(reversed(name.split(":")))


def _base_pixels(base: str, name: str) -> int:
    match = _BASE_NAME.fullmatch(base)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"`{name}` is not a resolution", allowed=_ALLOWED)
    number = int(match[1])
    return number * number if match[2] == "px" else int(number * number / 9 * 16)


def _fit(pixels: int, ratio: str, step: int, nearest: bool) -> Size | None:
    """The size of about `pixels` pixels and the given ratio, both sides multiples of `step`; None: no room for one."""
    width_part, height_part = map(float, ratio.split(":"))
    width = int(math.sqrt(pixels * (width_part / height_part)) // step) * step
    if width == 0:
        return None
    height = int((pixels / width) // step) * step
    best = (height, width)
    if nearest:
        # Every candidate is one step from the size above, not from the best so far.
        for down, across in ((-step, 0), (step, 0), (0, -step), (0, step)):
            candidate = (height + down, width + across)
            if abs(candidate[0] * candidate[1] - pixels) < abs(best[0] * best[1] - pixels):
                best = candidate
    return best if best[0] > 0 and best[1] > 0 else None


@cache
def _table(pixels: int, step: int, training: bool) -> Mapping[str, Size]:
    sizes: dict[str, Size] = {}
    flipped: dict[str, Size] = {}
    for name in RATIO_NAMES:
        size = _fit(pixels, name, step, nearest=training)
        if size is None or (training and size in sizes.values()):
            continue
        sizes[name] = size
        flipped[_flipped(name)] = (size[1], size[0])
    return MappingProxyType(sizes | flipped)


def resolve_resolution(name: str, spatial_compression: int, training: bool = True) -> Resolution:
    """The sizes that a resolution name stands for.

    Args:
        name: `{N}px` (N x N pixels) or `{N}p` (N x N * 16 / 9 pixels), perhaps followed by `_max` (only the ratio with
            the most pixels) or `_ar{W}:{H}` (only that ratio).
        spatial_compression: what height and width are multiples of.
        training: each size is moved one step towards the wanted number of pixels and no size stands for two ratios;
            else sizes are rounded down, one for each ratio.

    Raises:
        ConfigError: no such resolution, or none of its sizes is a multiple of `spatial_compression`.
    """
    if spatial_compression < 1:
        raise ConfigError(f"spatial compression `{spatial_compression}` is below 1")
    base, underscore, setting = name.partition("_")
    pixels = _base_pixels(base, name)
    sizes = _table(pixels, spatial_compression, training)
    if not sizes:
        side = math.isqrt(pixels)
        raise ConfigError(
            f"resolution `{name}` has room for no frame: {pixels} pixels, sides in steps of {spatial_compression}",
            allowed=f"at least `{spatial_compression}px`" if side < spatial_compression else None,
        )
    if not underscore:
        return Resolution(pixels, sizes)
    if setting == "max":
        # max() keeps the first of equals.
        ratio = max(sizes, key=lambda key: sizes[key][0] * sizes[key][1])
    elif setting.startswith("ar"):
        ratio = setting[2:]
        if ratio not in sizes:
            raise _no_ratio(name, base, ratio, sizes, spatial_compression)
    else:
        raise ConfigError(f"`{setting}` in resolution `{name}` is not a setting", allowed=_ALLOWED)
    return Resolution(pixels, MappingProxyType({ratio: sizes[ratio]}))


def _no_ratio(name: str, base: str, ratio: str, sizes: Mapping[str, Size], step: int) -> ConfigError:
    allowed = ", ".join(sizes)
    if ratio in (*RATIO_NAMES, *map(_flipped, RATIO_NAMES)):
        size = _fit(_base_pixels(base, name), ratio, step, nearest=True)
        same = next((other for other, other_size in sizes.items() if other_size == size), None)
        if size is not None and same is not None:
            shape = f"{size[1]}x{size[0]}"
            return ConfigError(
                f"resolution `{name}`: in steps of {step} pixels `{ratio}` is {shape}, the same as `{same}`",
                allowed=allowed,
                hint=f"write `{base}_ar{same}`",
            )
    return ConfigError(f"resolution `{name}`: no ratio `{ratio}` in steps of {step} pixels", allowed=allowed)


def image_size(resolution: str, ratio: str, spatial_compression: int) -> Size:
    """(height, width) that a sample of this resolution and ratio (`width:height`) is generated at."""
    sizes = resolve_resolution(resolution, spatial_compression, training=False).sizes
    if ratio not in sizes:
        raise ConfigError(f"`{ratio}` is not an aspect ratio of `{resolution}`", allowed=", ".join(sizes))
    return sizes[ratio]


def closest_ratios(ratios: NDArray[np.float64], sizes: Mapping[str, Size]) -> NDArray[np.intp]:
    """For each height / width, the place in `sizes` of the ratio whose nominal value is nearest, the first of equals.

    Args:
        ratios: height / width of the clips, [N].
        sizes: as in `Resolution.sizes`; what counts is the ratio in the name, not the size that was made of it.
    """
    nominal = np.array([ratio_value(name) for name in sizes])
    return np.abs(ratios[:, None] - nominal[None, :]).argmin(axis=1)
