"""Writing videos: exactly the size, the number of frames, the rate, and, when asked for, every value."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from support.clips import frame_numbers, pictures, real_clip

from osora_cli.data.media import MediaError, MediaInfo, probe, read_frames, write_video


@pytest.mark.parametrize("ext", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("size", [(96, 64), (161, 97), (64, 193), (66, 48)])
def test_lossless_keeps_every_value(size: tuple[int, int], ext: str, tmp_path: Path) -> None:
    path = tmp_path / f"clip.{ext}"
    frames = np.random.default_rng(0).integers(0, 256, (7, size[1], size[0], 3), dtype=np.uint8)
    write_video(path, frames, 24, lossless=True)
    assert probe(path) == MediaInfo(7, size[1], size[0], 24.0, is_image=False)
    assert np.array_equal(read_frames(path, range(7)), frames)


@pytest.mark.parametrize("size", [(96, 64), (161, 97)])
def test_the_default_is_near_lossless_and_keeps_the_size(size: tuple[int, int], tmp_path: Path) -> None:
    frames = pictures(20, size)
    write_video(tmp_path / "clip.mp4", frames, 24)
    assert probe(tmp_path / "clip.mp4") == MediaInfo(20, size[1], size[0], 24.0, is_image=False)
    again = read_frames(tmp_path / "clip.mp4", range(20))
    assert frame_numbers(again) == list(range(20))
    assert np.abs(again.astype(int) - frames).mean() < 3, "levels; most of it at the edges of colour planes"


def test_a_real_clip_comes_back_at_40_db(tmp_path: Path) -> None:
    frames = read_frames(real_clip("bikes"), range(24))
    write_video(tmp_path / "clip.mp4", frames, 25)
    error = read_frames(tmp_path / "clip.mp4", range(24)).astype(float) - frames
    assert 10 * np.log10(255**2 / (error**2).mean()) > 40


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 1), (1, 16)])
def test_tiny_pictures(size: tuple[int, int], tmp_path: Path) -> None:
    frames = np.full((3, size[1], size[0], 3), 120, dtype=np.uint8)
    for lossless in (False, True):
        write_video(tmp_path / "clip.mp4", frames, 10, lossless)
        assert read_frames(tmp_path / "clip.mp4", range(3)).shape == frames.shape


@pytest.mark.parametrize(
    ("fps", "fraction"),
    [
        (24, Fraction(24)),
        (23.976, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (Fraction(30000, 1001), Fraction(30000, 1001)),
        (12.5, Fraction(25, 2)),
        (0.5, Fraction(1, 2)),
        (10.467, Fraction(10467, 1000)),
    ],
)
def test_the_rate_is_kept_as_a_fraction(fps: float | Fraction, fraction: Fraction, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_video(path, pictures(5), fps)
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == fraction
    assert probe(path).fps == pytest.approx(float(fps), abs=1e-3)
    write_video(path, pictures(5), probe(path).fps)
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == fraction


def test_frames_that_are_none() -> None:
    for frames in (np.zeros((0, 4, 4, 3), np.uint8), np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4, 3), np.float32)):
        with pytest.raises(ValueError, match=r"frames must be uint8 \[T, H, W, 3\] with T >= 1"):
            write_video("never.mp4", frames, 24)
    for fps in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="frames per second must be above 0"):
            write_video("never.mp4", np.zeros((1, 4, 4, 3), np.uint8), fps)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"clip\.mp4`: cannot be written"):
        write_video(tmp_path / "nowhere" / "clip.mp4", pictures(1), 24)
    with pytest.raises(MediaError, match=r"clip\.xyz`: cannot be written"):
        write_video(tmp_path / "clip.xyz", pictures(1), 24)
