from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osora_cli.app.picture import ERROR_GAIN, ShownClip, side_by_side


def clip(size: tuple[int, int], count: int, title: str = "bikes: PSNR 30.00 dB") -> ShownClip:
    rng = np.random.default_rng(0)
    frames = []
    for i in range(count):
        original = rng.integers(40, 200, (*size, 3), dtype=np.uint8)
        frames.append((10 * i, original, original + np.uint8(10)))
    return ShownClip(title, frames)


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def error_cells(pixels: np.ndarray) -> np.ndarray:
    """Where errors are shown: they are the same everywhere, so areas of one colour (single pixels are of letters)."""
    error = (pixels == 10 * ERROR_GAIN).all(2)
    return error & (error.sum(1, keepdims=True) > 50) & (error.sum(0, keepdims=True) > 50)


def test_small_frames_are_enlarged_by_whole_factors_and_the_error_is_amplified(tmp_path: Path) -> None:
    shown = clip((64, 64), 3)
    side_by_side([shown], tmp_path / "p.png")
    pixels = opened(tmp_path / "p.png")
    error = error_cells(pixels)
    assert error.sum() == 3 * 192 * 192
    original = shown.frames[0][1]
    rows, columns = np.nonzero(error)
    left = columns.min()
    top = rows.min() - 2 * (192 + 8)
    assert np.array_equal(pixels[top : top + 192 : 3, left : left + 192 : 3], original)
    assert np.array_equal(pixels[top + 1 : top + 192 : 3, left + 2 : left + 192 : 3], original)
    below = pixels[top + 200 : top + 392 : 3, left : left + 192 : 3]
    assert np.array_equal(below, original + 10)


def test_the_labels_are_there_and_do_not_cover_the_frames(tmp_path: Path) -> None:
    side_by_side([clip((64, 64), 2)], tmp_path / "p.png")
    pixels = opened(tmp_path / "p.png")
    error = error_cells(pixels)
    left = np.nonzero(error)[1].min()
    dark = (pixels < 100).all(2) & ~error
    assert dark[:, : left - 8].sum() > 300  # the names of three rows
    assert dark[:48].sum() > 300  # title and frame numbers
    assert not dark[48:, left - 8 : left].any()


@pytest.mark.parametrize("size", [(720, 1280), (64, 192), (192, 64), (1, 1), (7, 400), (272, 640)])
def test_any_size_makes_a_picture_of_bounded_size(tmp_path: Path, size: tuple[int, int]) -> None:
    side_by_side([clip(size, 4), clip((64, 64), 1, title="x" * 200)], tmp_path / "p.png")
    height, width = opened(tmp_path / "p.png").shape[:2]
    assert width < 2400
    assert height < 2400


def test_nothing_but_the_picture_is_left_and_an_old_one_survives_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    side_by_side([clip((32, 32), 1)], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="frames"):
        side_by_side([clip((32, 32), 0)], path)
    with pytest.raises(ValueError, match="frames"):
        side_by_side([], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]
