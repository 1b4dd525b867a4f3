"""Writing videos: H.264 that any player opens, or lossless RGB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from osora_cli.data.media_types import AnyPath, MediaError
from osora_cli.data.streams import error_text

_BT601, _LIMITED = 6, 1  # SMPTE 170M and MPEG range, in FFmpeg's numbering


class VideoWriter:
    """Writes one video frame by frame, so that a long one need not be in memory. A context manager, or `close` it.

    Args:
        path: the file; its extension chooses the container (.mp4, .mov or .mkv).
        size: height and width of every frame, from 1, odd ones too.
        fps: frames per second; 23.976 and its like are written as the broadcast fraction they stand for.
        lossless: keep every RGB value.
    """

    def __init__(self, path: AnyPath, size: tuple[int, int], fps: float | Fraction, lossless: bool = False) -> None:
        self._path = Path(path)
        self._size = size
        height, width = size
        even = height % 2 == 0 and width % 2 == 0
        rate = _rate(fps)
        try:
            opened = av.open("file:" + os.path.abspath(self._path), "w")
        except (av.FFmpegError, OSError, ValueError) as error:
            raise MediaError(self._path, f"cannot be written: {error_text(error)}") from error
        self._container: av.container.OutputContainer | None = opened
        self._stream = self._container.add_stream("libx264rgb" if lossless else "libx264", rate=rate)
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = "rgb24" if lossless else "yuv420p" if even else "yuv444p"
        if not lossless:
            # What the conversion below does: said, so that players undo it and not BT.709, their guess for large sizes.
            self._stream.codec_context.colorspace = _BT601
            self._stream.codec_context.color_range = _LIMITED
        self._stream.options = {"crf": "0" if lossless else "12", "preset": "veryfast"}

    def write(self, frames: NDArray[np.uint8]) -> None:
        """Appends frames `[T, H, W, 3]` uint8 RGB.

        Raises:
            MediaError: no such folder, no space, or no right to write.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (*self._size, 3):
            raise ValueError(f"frames must be uint8 {['T', *self._size, 3]}, got {frames.dtype} {list(frames.shape)}")
        if self._container is None:
            raise ValueError("the video is closed")
        with self._reported():
            for picture in frames:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Writes what the encoder still holds, and the file's end. May be called again.

        Raises:
            MediaError: no space, or no right to write.
        """
        container, self._container = self._container, None
        if container is not None:
            with self._reported(), container:
                container.mux(self._stream.encode(None))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (av.FFmpegError, OSError) as error:
            raise MediaError(self._path, f"cannot be written: {error_text(error)}") from error

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        container, self._container = self._container, None
        if container is not None:
            with suppress(av.FFmpegError, OSError):  # the first error is the one to report
                container.close()


def write_video(path: AnyPath, frames: NDArray[np.uint8], fps: float | Fraction, lossless: bool = False) -> None:
    """Writes frames `[T, H, W, 3]` uint8 RGB as one video of exactly that size and number of frames.

    Arguments as those of `VideoWriter`, with T >= 1.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.shape[0] == 0:
        raise ValueError(f"frames must be uint8 [T, H, W, 3] with T >= 1, got {frames.dtype} {list(frames.shape)}")
    with VideoWriter(path, (frames.shape[1], frames.shape[2]), fps, lossless) as writer:
        writer.write(frames)


def _rate(fps: float | Fraction) -> Fraction:
    """The fraction that a decimal rate stands for: 29.97 is 30000/1001."""
    if not (0 < fps < float("inf")):
        raise ValueError(f"frames per second must be above 0, got {fps}")
    exact = Fraction(fps)
    if exact.denominator in (1, 1001):
        return exact
    broadcast = Fraction(round(exact * 1001 / 1000) * 1000, 1001)
    if round(float(broadcast), 2) == round(float(exact), 2):
        return broadcast
    return exact.limit_denominator(1001)
