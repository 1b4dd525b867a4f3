"""Stills: read with Pillow, turned after their EXIF tag, always to 8-bit RGB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from osora_cli.data.media_types import AnyPath, MediaError
from osora_cli.data.streams import error_text, regular_file

_TIFF_WIDTH, _TIFF_HEIGHT, _EXIF_ORIENTATION = 0x0100, 0x0101, 0x0112
# EXIF 2.32, 4.6.4: orientations 5 to 8 swap rows and columns.
_TURNED = frozenset({5, 6, 7, 8})


@contextmanager
def _open_still(path: AnyPath) -> Iterator[Image.Image]:
    checked = regular_file(path)
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd tags and of sizes; an image that cannot be read still raises.
            warnings.simplefilter("ignore")
            with Image.open(checked) as image:
                yield image
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError) as error:
        raise MediaError(checked, error_text(error)) from error


def still_size(path: AnyPath) -> tuple[int, int]:
    """(height, width) as displayed, without decoding (a PNG is read through, for its EXIF data may stand at its end).

    Raises:
        MediaError: the file is not an image that Pillow knows.
    """
    with _open_still(path) as image:
        if isinstance(image, TiffImageFile):
            # Some versions of Pillow give the size of a TIFF as stored, some as displayed; its own tags are clear.
            width, height = int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
            turned = image.tag_v2.get(_EXIF_ORIENTATION) in _TURNED
        else:
            width, height = image.size
            turned = image.getexif().get(_EXIF_ORIENTATION) in _TURNED
    return (width, height) if turned else (height, width)


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit grey: Pillow's own conversion would clip everything above 255 to white.
        grey = np.asarray(image, dtype=np.float64)
        if image.mode == "F" or grey.min() < 0 or grey.max() > 65535:
            raise ValueError(f"grey values of mode {image.mode}, {grey.min():g} to {grey.max():g}, have no 8-bit form")
        levels = np.round(grey * (255 / 65535)).astype(np.uint8)
        return np.repeat(levels[:, :, None], 3, axis=2)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.asarray(image.convert("RGB"))


def read_still(path: AnyPath) -> NDArray[np.uint8]:
    """`[H, W, 3]` uint8 RGB as displayed. Alpha is dropped, palettes, grey and CMYK are converted.

    Raises:
        MediaError: the file is not an image, is cut off, or has no 8-bit form.
    """
    with _open_still(path) as image:
        return _to_rgb(ImageOps.exif_transpose(image))
