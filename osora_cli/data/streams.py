"""Opening a video, choosing the stream that is the film, and going through its packets and frames.

Written against PyAV 14 to 18.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import av

from osora_cli.data.media_types import AnyPath, MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Codecs of cover art and thumbnails. A film in one of them is taken when there is no other.
_PICTURE_CODECS = frozenset({"mjpeg", "png", "bmp", "gif", "tiff", "webp"})
# FFmpeg decodes pictures to learn their pixel format when it opens a file; nothing here needs that, and for a 720p
# clip it is nine tenths of the time. The option reaches only that step: decoding later is not touched by it.
_OPEN_OPTIONS = {"skip_frame": "all"}
# It is given only to containers that list their streams at the start. With others, in which FFmpeg finds streams on
# the way, PyAV before 18 frees more options than it made, and crashes.
_ISO_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
# The decoder gives up on a packet where it would else make up what is missing: damage must not pass as content.
_DECODE_OPTIONS = {"err_detect": "explode"}


def error_text(error: BaseException) -> str:
    """One line out of what FFmpeg, Pillow or the system said."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def regular_file(path: AnyPath) -> Path:
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
def open_video(path: AnyPath) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a video for one thread's use and closes it in every case.

    Raises:
        MediaError: there is no such file, it is not a container, or it has no film in it. FFmpeg's own errors inside
            the block become MediaError too.
    """
    checked = regular_file(path)
    # The absolute path keeps FFmpeg from reading a name such as `http:x.mp4` or `-x.mp4` as something else.
    name = "file:" + os.path.abspath(checked)
    try:
        options = dict(_OPEN_OPTIONS) if _lists_streams(checked) else {}
        with av.open(name, options=options, metadata_errors="replace") as container:
            stream = _film(container, checked)
            stream.codec_context.thread_count = 1
            stream.codec_context.options = dict(_DECODE_OPTIONS)
            yield container, stream
    except (av.FFmpegError, OSError, UnicodeError) as error:
        raise MediaError(checked, error_text(error)) from error


def _lists_streams(path: Path) -> bool:
    """Whether a file begins like an mp4 or mov, a Matroska or an AVI."""
    with path.open("rb") as file:
        head = file.read(12)
    return head[4:8] in _ISO_BOXES or head[:4] == b"\x1a\x45\xdf\xa3" or head[:4] + head[8:] == b"RIFFAVI "


def _film(container: InputContainer, path: Path) -> VideoStream:
    """The stream that players show: a film codec before a picture codec, the default one, the largest, the first."""
    videos = [stream for stream in container.streams.video if stream.codec_context is not None]
    films = [stream for stream in videos if not _is_picture(stream)]
    if not films:
        if container.streams.video:
            raise MediaError(path, "its only video stream is cover art" if videos else "no decoder for its video codec")
        has = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise MediaError(path, f"no video stream (it holds: {has})")

    def rank(stream: VideoStream) -> tuple[bool, bool, int, int]:
        disposition = getattr(stream, "disposition", None)
        default = disposition is not None and bool(disposition & type(disposition).default)
        area = (stream.height or 0) * (stream.width or 0)
        return stream.codec_context.name not in _PICTURE_CODECS, default, area, -stream.index

    return max(films, key=rank)


def _is_picture(stream: VideoStream) -> bool:
    """Whether a video stream is cover art or a thumbnail, not a film."""
    disposition = getattr(stream, "disposition", None)
    if disposition is not None:
        kinds = type(disposition)
        return bool(disposition & (kinds.attached_pic | kinds.timed_thumbnails | kinds.still_image))
    # PyAV 14.0 does not tell what a stream is for.
    return stream.codec_context.name in _PICTURE_CODECS and stream.frames <= 1 and not stream.average_rate


def packets_of(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Packets with data in them. A container that cannot be read on ends there, as a cut one does."""
    try:
        for packet in container.demux(stream):
            if packet.size:
                yield packet
    except (av.FFmpegError, OSError):
        return


def decode(stream: VideoStream, packets: Iterable[Packet[VideoStream]], *, lenient_start: bool) -> Iterator[VideoFrame]:
    """Frames in display order, up to the end or to what is decoded before the first packet that the decoder refuses.

    Args:
        stream: whose decoder is fresh or flushed.
        packets: in decode order.
        lenient_start: pass over packets that are refused before the first frame comes, as when a stream begins
            between key frames.
    """
    codec = stream.codec_context
    started = not lenient_start
    for packet in packets:
        try:
            frames = codec.decode(packet)
        except (av.FFmpegError, OSError):
            if started:
                break
            continue
        started = started or bool(frames)
        yield from frames
    try:
        yield from codec.decode(None)
    except (av.FFmpegError, OSError):
        return
