"""Colours: 8 and 10 bits alike, stills of every mode in RGB, turned as they are shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from support.clips import cut_bytes, frame_number, make_clip, picture

from osora_cli.data.media import MediaError, MediaInfo, is_still, probe, read_frames
from osora_cli.data.pixels import eight_bit_format, rgb_of


@pytest.mark.parametrize("deep", ["yuv420p10le", "yuv420p12le", "p010le"])
def test_deep_colour_equals_the_same_film_in_eight_bits(deep: str) -> None:
    shallow = av.VideoFrame.from_ndarray(picture(5), format="rgb24").reformat(format="yuv420p")
    difference = np.abs(rgb_of(shallow.reformat(format=deep)).astype(int) - rgb_of(shallow))
    assert difference.max() <= 2, "0 with FFmpeg 8"


def test_ten_bit_files_are_within_two_levels(tmp_path: Path) -> None:
    lossless = {"libx264": {"qp": "0"}, "libx265": {"x265-params": "lossless=1:log-level=none"}}
    shallow = make_clip(tmp_path / "8.mp4", frames=4, options=lossless["libx264"])
    with av.open(str(shallow)) as container:
        frames = [frame.reformat(format="yuv420p10le") for frame in container.decode(video=0)]
    for codec, options in lossless.items():
        path = tmp_path / f"10_{codec}.mp4"
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream(codec, rate=24)
            stream.width, stream.height, stream.pix_fmt, stream.options = 96, 64, "yuv420p10le", options
            for number, frame in enumerate(frames):
                frame.pts, frame.time_base = number, stream.codec_context.time_base or frame.time_base
                frame.pts = None
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        difference = np.abs(read_frames(path, range(4)).astype(int) - read_frames(shallow, range(4)))
        assert difference.max() <= 2


def test_names_of_deep_formats() -> None:
    assert eight_bit_format("yuv422p10le") == "yuv422p"
    assert eight_bit_format("gbrp12be") == "gbrp"
    assert eight_bit_format("gray16le") == "gray"
    assert eight_bit_format("p210le") == "yuv422p"
    for shallow in ("yuv420p", "yuvj420p", "rgb24", "pal8", "nv12", "rgb48le"):
        assert eight_bit_format(shallow) is None


ORIENTATIONS = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: lambda image: np.rot90(image, -1),
}


@pytest.mark.parametrize("tag", ORIENTATIONS)
@pytest.mark.parametrize("ext", ["png", "tif", "webp", "jpg"])
def test_stills_are_turned_after_exif(tag: int, ext: str, tmp_path: Path) -> None:
    path = tmp_path / f"still.{ext}"
    exif = Image.Exif()
    exif[0x0112] = tag
    stored = Image.fromarray(np.ascontiguousarray(ORIENTATIONS[tag](picture(9))))
    options = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}.get(ext, {})
    stored.save(path, exif=exif, **options)
    info = probe(path)
    assert (info.num_frames, info.height, info.width, info.is_image) == (1, 64, 96, True)
    assert math.isnan(info.fps)
    shown = read_frames(path, [0])
    assert shown.shape == (1, 64, 96, 3)
    assert np.abs(shown[0].astype(int) - picture(9)).mean() < 3
    assert frame_number(shown[0]) == 9


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    colour = Image.fromarray(picture(2))
    grey = np.asarray(colour.convert("L"))
    alpha = colour.copy()
    alpha.putalpha(Image.fromarray(np.full((64, 96), 128, np.uint8)))
    saved = {
        "grey.png": colour.convert("L"),
        "bits.png": colour.convert("1"),
        "palette.png": colour.convert("P"),
        "alpha.png": alpha,
        "grey_alpha.png": alpha.convert("LA"),
        "cmyk.jpg": colour.convert("CMYK"),
        "ycc.jpg": colour.convert("YCbCr"),
        "plain.ppm": colour,
        "plain.bmp": colour,
        "grey.pgm": colour.convert("L"),
        "deep.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "deep.tif": Image.fromarray(grey.astype(np.uint16) * 257),
    }
    for name, image in saved.items():
        image.save(tmp_path / name)
        assert is_still(name)
        assert probe(tmp_path / name) == probe(tmp_path / name, exact=True) or math.isnan(probe(tmp_path / name).fps)
        shown = read_frames(tmp_path / name, [0, 0])
        assert shown.shape == (2, 64, 96, 3)
        assert shown.dtype == np.uint8
        if name.startswith(("plain", "alpha")):
            assert np.array_equal(shown[0], picture(2))
        if name.startswith(("grey", "deep")):
            assert np.array_equal(shown[0], np.repeat(grey[..., None], 3, axis=2)), name
    palette = tmp_path / "see_through.png"
    colour.convert("P").save(palette, transparency=bytes(range(256)))
    assert read_frames(palette, [0]).shape == (1, 64, 96, 3)


def test_stills_that_are_none(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(whole)
    cut = cut_bytes(whole, tmp_path / "cut.jpg", 0.5)
    assert (probe(cut).height, probe(cut).width) == (64, 96), "only the header is asked"
    for look in (lambda path: probe(path, exact=True), lambda path: read_frames(path, [0])):
        with pytest.raises(MediaError, match=r"cut\.jpg`: .*truncated"):
            look(cut)
    (tmp_path / "text.jpg").write_text("no picture")
    with pytest.raises(MediaError, match=r"text\.jpg`: cannot identify image file"):
        probe(tmp_path / "text.jpg")
    Image.fromarray(np.linspace(-1, 9, 24, dtype=np.float32).reshape(4, 6)).save(tmp_path / "floats.tif")
    with pytest.raises(MediaError, match="mode F, -1 to 9, have no 8-bit form"):
        read_frames(tmp_path / "floats.tif", [0])
    with pytest.raises(MediaError, match="frame 1 is asked for, but it holds 1"):
        read_frames(whole, [1])


def test_what_is_a_still_is_a_matter_of_its_name(tmp_path: Path) -> None:
    assert is_still("A.JPEG")
    assert not is_still("a.gif")
    assert not is_still("jpg")
    path = make_clip(tmp_path / "film.mp4", frames=3)
    disguised = path.rename(tmp_path / "film.bin")
    assert probe(disguised) == MediaInfo(3, 64, 96, 24.0, is_image=False)
