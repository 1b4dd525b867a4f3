"""Opening a video, choosing the stream that is the film, and how its pictures are turned.

Written against PyAV 14 to 18. Nothing here depends on the order in which a container keeps its packets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from osora_cli.data.media_types import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Codecs of cover art, for PyAV versions that do not tell what a stream is for.
_PICTURE_CODECS = frozenset({"mjpeg", "png", "bmp", "gif", "tiff", "webp"})


@dataclass(frozen=True)
class Orientation:
    """How a decoded picture is turned before it is shown: transpose first, then the two flips.

    The eight values are the eight ways a display matrix of right angles can turn or mirror a picture.
    """

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) as displayed, of a picture of that coded size."""
        return (width, height) if self.transpose else (height, width)

    def apply(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[H, W, 3]` as coded to `[H, W, 3]` as displayed. A view where that is enough."""
        if self.transpose:
            picture = picture.swapaxes(0, 1)
        if self.flip_rows:
            picture = picture[::-1]
        if self.flip_columns:
            picture = picture[:, ::-1]
        return picture


def orientation_of(frame: VideoFrame) -> Orientation:
    """Reads the display matrix that came with a frame (ISO 14496-12, 8.3.2: rows of `a b u; c d v; x y w`).

    The matrix sends column x and row y to (a x + c y, b x + d y). Angles between the right ones are taken as the
    nearest right one.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Orientation()
    a, b, _, c, d = (int(value) for value in np.frombuffer(bytes(data), dtype=np.int32)[:5])
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Orientation(transpose=True, flip_rows=b < 0, flip_columns=c < 0)
    return Orientation(flip_rows=d < 0, flip_columns=a < 0)


def _is_picture(stream: VideoStream) -> bool:
    """Whether a video stream is cover art or a thumbnail, not a film."""
    disposition = getattr(stream, "disposition", None)
    if disposition is not None:
        kinds = type(disposition)
        return bool(disposition & (kinds.attached_pic | kinds.timed_thumbnails | kinds.still_image))
    return stream.codec_context.name in _PICTURE_CODECS and stream.frames <= 1 and not stream.average_rate


def _film(container: InputContainer, path: Path) -> VideoStream:
    """The stream that players show: one marked as default before others, then the largest, then the first."""
    films = [stream for stream in container.streams.video if not _is_picture(stream)]
    if not films:
        has = ", ".join(sorted({stream.type for stream in container.streams})) or "no stream at all"
        reason = "only cover art" if container.streams.video else f"no video stream (it has: {has})"
        raise MediaError(path, reason)

    def rank(stream: VideoStream) -> tuple[bool, int, int]:
        disposition = getattr(stream, "disposition", None)
        default = disposition is not None and bool(disposition & type(disposition).default)
        return default, (stream.height or 0) * (stream.width or 0), -stream.index

    return max(films, key=rank)


def error_text(error: BaseException) -> str:
    """One line out of what FFmpeg or Pillow said."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, if a file with bytes in it is there; else MediaError. A pipe or device would block whoever opens it."""
    checked = Path(path)
    try:
        if not checked.exists():
            raise MediaError(checked, "no such file")
        if not checked.is_file():
            raise MediaError(checked, "not a regular file")
        if checked.stat().st_size == 0:
            raise MediaError(checked, "empty file (0 bytes)")
    except (OSError, ValueError) as error:
        raise MediaError(checked, error_text(error)) from error
    return checked


@contextmanager
def open_video(path: str | os.PathLike[str]) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a video for one thread's use and closes it in every case.

    Raises:
        MediaError: there is no such file, it is not a container, or it has no film in it. FFmpeg's own errors inside
            the block become MediaError too.
    """
    checked = regular_file(path)
    # The absolute path keeps FFmpeg from reading a name such as `http:x.mp4` or `-x.mp4` as something else.
    name = "file:" + os.path.abspath(checked)
    try:
        with av.open(name, metadata_errors="replace") as container:
            stream = _film(container, checked)
            stream.codec_context.thread_count = 1
            yield container, stream
    except (av.FFmpegError, OSError, UnicodeError) as error:
        raise MediaError(checked, error_text(error)) from error
