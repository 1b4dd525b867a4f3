"""Frames of a few clips in one picture: original over reconstruction over error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

ERROR_GAIN = 4
_CELL = 192  # pixels that the longer edge of a shown frame has at least, by repetition, and at most twice
_MARGIN = 8
_FONT = 15
_ROWS = ("original", "reconstruction", f"error x{ERROR_GAIN}")
_PAPER, _INK = (255, 255, 255), (20, 20, 20)


@dataclass
class ShownClip:
    """A clip in the picture.

    Attributes:
        title: stands above it.
        frames: number of each frame, original and reconstruction `[H, W, 3]` uint8, in order.
    """

    title: str
    frames: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]] = field(default_factory=list)


def sheet(clips: Sequence[ShownClip]) -> Image.Image:
    """Three rows a clip (original, reconstruction, absolute error times ERROR_GAIN), a column a frame.

    Small frames are enlarged by whole factors without smoothing, large ones reduced.

    Raises:
        ValueError: no clip, or a clip without frames.
    """
    if not clips or not all(clip.frames for clip in clips):
        raise ValueError("a picture needs clips with frames")
    blocks = [_block(clip) for clip in clips]
    width = max(block.width for block in blocks)
    image = Image.new("RGB", (width, sum(block.height for block in blocks)), _PAPER)
    top = 0
    for block in blocks:
        image.paste(block, (0, top))
        top += block.height
    return image


def side_by_side(clips: Sequence[ShownClip], path: Path) -> None:
    """Write `sheet` as a PNG. The file is replaced in one rename.

    Raises:
        ValueError: no clip, or a clip without frames.
        OSError: the file cannot be written.
    """
    image = sheet(clips)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp.png")
    try:
        image.save(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _block(clip: ShownClip) -> Image.Image:
    """One clip: its title, a line of frame numbers, and the three rows with their names at the left."""
    font = _font()
    line = sum(font.getmetrics()) + 4 if isinstance(font, ImageFont.FreeTypeFont) else _FONT + 4
    left = _MARGIN + round(max(font.getlength(name) for name in _ROWS)) + _MARGIN
    cell_h, cell_w = _shown_size(clip.frames[0][1].shape[:2])
    columns = len(clip.frames)
    width = max(left + columns * (cell_w + _MARGIN), _MARGIN + round(font.getlength(clip.title)) + _MARGIN)
    first_row = _MARGIN + 2 * line
    block = Image.new("RGB", (width, first_row + len(_ROWS) * (cell_h + _MARGIN) + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((_MARGIN, _MARGIN), clip.title, fill=_INK, font=font)
    for column, (number, original, reconstruction) in enumerate(clip.frames):
        x = left + column * (cell_w + _MARGIN)
        draw.text((x, _MARGIN + line), f"frame {number}", fill=_INK, font=font)
        error = np.abs(original.astype(np.int16) - reconstruction.astype(np.int16)) * ERROR_GAIN
        for row, pixels in enumerate((original, reconstruction, error.clip(0, 255).astype(np.uint8))):
            block.paste(_shown(pixels, (cell_h, cell_w)), (x, first_row + row * (cell_h + _MARGIN)))
    for row, name in enumerate(_ROWS):
        y = first_row + row * (cell_h + _MARGIN) + (cell_h - line) // 2
        draw.text((_MARGIN, max(y, first_row)), name, fill=_INK, font=font)
    return block


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, which needs no file; at one size only where Pillow was built without FreeType."""
    try:
        return ImageFont.load_default(size=_FONT)
    except (OSError, ImportError, TypeError):
        return ImageFont.load_default()


def _shown_size(size: tuple[int, ...]) -> tuple[int, int]:
    height, width = size
    longest = max(height, width)
    if longest < _CELL:
        factor = -(-_CELL // longest)
        return height * factor, width * factor
    scale = min(1.0, 2 * _CELL / longest)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _shown(pixels: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    enlarged = size[0] >= pixels.shape[0]
    return image.resize((size[1], size[0]), Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)
