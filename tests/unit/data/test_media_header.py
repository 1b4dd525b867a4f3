"""What is read out of headers and packets by hand agrees with FFmpeg, and odd bytes are no more than odd."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest
from support.clips import frame_numbers, make_clip, pictures, real_clips, set_display_matrix

from osora_cli.data.bitstream import is_packed, picture_parameters
from osora_cli.data.iso import read_iso_header
from osora_cli.data.media import probe, read_frames
from osora_cli.data.orientation import Orientation


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("header") / "clip.mp4", frames=3)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
def test_the_header_turns_pictures_as_ffmpeg_says(rotate: int, mirror: bool, clip: Path, tmp_path: Path) -> None:
    path = tmp_path / "turned.mp4"
    path.write_bytes(clip.read_bytes())
    set_display_matrix(path, rotate, mirror=mirror)
    header = read_iso_header(path)
    assert header is not None
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        assert header.orientations[container.streams.video[0].id] == Orientation.of_frame(frame)
    assert (probe(path).height, probe(path).width) == ((96, 64) if rotate in (90, 270) else (64, 96))


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
def test_turned_clips_are_shown_upright(rotate: int, mirror: bool, tmp_path: Path) -> None:
    path = make_clip(tmp_path / "turned.mp4", frames=3, rotate=rotate, mirror=mirror)
    shown = read_frames(path, range(3))
    assert shown.shape == (3, 64, 96, 3)
    assert frame_numbers(shown) == [0, 1, 2]
    assert np.abs(shown.astype(int) - pictures(3)).mean() < 5


def test_the_movie_matrix_counts_too(clip: Path, tmp_path: Path) -> None:
    data = bytearray(clip.read_bytes())
    at = data.index(b"mvhd") + 4 + 36
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    path = tmp_path / "movie.mp4"
    path.write_bytes(data)
    header = read_iso_header(path)
    assert header is not None
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        assert header.orientations[1] == Orientation.of_frame(frame) == Orientation(transpose=True, flip_columns=True)
    assert (probe(path).height, probe(path).width) == (96, 64)


def test_fragments_are_seen(tmp_path: Path) -> None:
    for flags, fragmented in (("", False), ("frag_keyframe", True), ("frag_keyframe+empty_moov", True)):
        path = make_clip(tmp_path / "clip.mp4", frames=30, mux_options={"movflags": flags} if flags else {})
        header = read_iso_header(path)
        assert header is not None
        assert header.fragmented is fragmented


def test_real_headers() -> None:
    for path in real_clips():
        header = read_iso_header(path)
        assert header is not None
        assert (header.fragmented, set(header.descriptions.values())) == (False, {1})


def test_odd_bytes_in_a_header_never_raise(clip: Path, tmp_path: Path) -> None:
    data = clip.read_bytes()
    begin = data.index(b"moov") - 4
    rng = np.random.default_rng(0)
    path = tmp_path / "odd.mp4"
    for _ in range(300):
        odd = bytearray(data)
        for place in rng.integers(begin, len(data), 4):
            odd[place] = rng.integers(256)
        path.write_bytes(odd[: int(rng.integers(begin, len(data) + 1))])
        read_iso_header(path)
    assert read_iso_header(make_clip(tmp_path / "clip.mkv", frames=2)) is None
    assert read_iso_header(tmp_path / "gone.mp4") is None


def test_parameters_of_key_frames() -> None:
    sps, other, slice_ = b"\x67\x4d\x40\x1f", b"\x67\x4d\x40\x20", b"\x65" + bytes(500)
    coded = b"\0\0\0\1" + sps + b"\0\0\1" + slice_
    assert picture_parameters("h264", memoryview(coded), lengths=False) == sps
    units = b"".join(len(unit).to_bytes(4, "big") + unit for unit in (other, slice_))
    assert picture_parameters("h264", memoryview(units), lengths=True) == other
    # A length of 256 to 511 looks like a start code.
    assert picture_parameters("h264", memoryview(b"\0\0\1\xf5" + slice_), lengths=True) == b""
    assert picture_parameters("prores", memoryview(coded), lengths=False) == b""
    for codec in ("h264", "hevc", "vp8", "vp9", "mpeg2video"):
        assert picture_parameters(codec, memoryview(b""), lengths=True) == b""


def test_packed_frames_are_recognised() -> None:
    assert is_packed("mpeg4", memoryview(b"\0\0\1\xb2DivX503b1393p\0\0\1\xb6"))
    assert not is_packed("mpeg4", memoryview(b"\0\0\1\xb2DivX503b1393\0\0\1\xb6"))
    assert not is_packed("h264", memoryview(b"DivX503b1393p"))
