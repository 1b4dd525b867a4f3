"""Reading chosen frames: decodes from the key frame before the first wanted one to the last wanted one, no further."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from osora_cli.data.frame_index import FrameIndex, frame_index
from osora_cli.data.media_types import MediaError, is_still
from osora_cli.data.stills import read_still
from osora_cli.data.streams import open_video

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream


def read_frames(path: str | os.PathLike[str], indices: Sequence[int]) -> NDArray[np.uint8]:
    """Frames of a video or still, by their place in display order.

    Args:
        path: the file.
        indices: frame numbers from 0, in any order, repeats allowed.

    Returns:
        `[len(indices), H, W, 3]` uint8 RGB in displayed orientation, in the order of `indices`.

    Raises:
        MediaError: with path and index, when the file holds fewer frames, a frame cannot be decoded, or the picture's
            size changes in mid-stream; with path and reason when it is not a video or still.
    """
    wanted = np.unique(np.asarray(indices, dtype=np.int64))
    if wanted.size == 0:
        raise ValueError("no frame is asked for")
    if wanted[0] < 0:
        raise ValueError(f"frame numbers start at 0, got {wanted[0]}")
    if is_still(path):
        _check_range(path, wanted, 1)
        return np.repeat(read_still(path)[None], len(indices), axis=0)
    index = frame_index(path)
    _check_range(path, wanted, index.num_frames)
    row_of = {int(frame): row for row, frame in enumerate(wanted)}
    out = np.empty((len(wanted), index.height, index.width, 3), dtype=np.uint8)
    missing = _fill(path, index, row_of, out, from_start=False)
    if missing is not None:
        missing = _fill(path, index, row_of, out, from_start=True)
    if missing is not None:
        raise MediaError(path, f"frame {missing} of {index.num_frames} cannot be decoded (the file is damaged)")
    order = np.searchsorted(wanted, np.asarray(indices, dtype=np.int64))
    return out if np.array_equal(order, np.arange(len(wanted))) else out[order]


def _check_range(path: str | os.PathLike[str], wanted: NDArray[np.int64], num_frames: int) -> None:
    if wanted[-1] >= num_frames:
        raise MediaError(path, f"frame {wanted[-1]} is asked for, but it holds {num_frames}")


def _fill(
    path: str | os.PathLike[str], index: FrameIndex, row_of: dict[int, int], out: NDArray[np.uint8], *, from_start: bool
) -> int | None:
    """Decodes into `out`. Returns the first wanted frame that did not come, or None."""
    waiting = set(row_of)
    first, last = min(waiting), max(waiting)
    with open_video(path) as (container, stream):
        for number, frame in _numbered(container, stream, index, first, from_start=from_start):
            if number in waiting:
                out[row_of[number]] = _picture(path, index, number, frame)
                waiting.discard(number)
            if number >= last:
                break
    return min(waiting) if waiting else None


def _picture(path: str | os.PathLike[str], index: FrameIndex, number: int, frame: VideoFrame) -> NDArray[np.uint8]:
    height, width = index.orientation.size(frame.height, frame.width)
    if (height, width) != (index.height, index.width):
        reason = f"the picture's size changes in mid-stream: {index.width}x{index.height} at first, {width}x{height}"
        raise MediaError(path, f"{reason} at frame {number}")
    return index.orientation.apply(frame.to_ndarray(format="rgb24"))


def _numbered(
    container: InputContainer, stream: VideoStream, index: FrameIndex, first: int, *, from_start: bool
) -> Iterator[tuple[int, VideoFrame]]:
    """Decoded frames with their place in display order, from `first` or before."""
    if index.times is None:
        yield from enumerate(_decoded(stream, container.demux(stream)))
        return
    packets = container.demux(stream) if from_start else _from_key_frame(container, stream, index, first)
    for frame in _decoded(stream, packets):
        if frame.pts is None:
            continue
        number = int(np.searchsorted(index.times, frame.pts))
        if number < index.num_frames and index.times[number] == frame.pts:
            yield number, frame


def _decoded(stream: VideoStream, packets: Iterator[Packet]) -> Iterator[VideoFrame]:
    for packet in packets:
        try:
            yield from stream.codec_context.decode(packet if packet.size else None)
        except av.error.InvalidDataError:
            continue  # the frame does not come, and is missed by its number


def _from_key_frame(
    container: InputContainer, stream: VideoStream, index: FrameIndex, first: int
) -> Iterator[Packet]:
    """Packets from the last key frame shown at or before frame `first`.

    Frames shown after a key frame need none decoded before it; those that lead it in display order may.
    """
    assert index.times is not None
    before = np.flatnonzero(index.key_times <= index.times[first])
    if before.size == 0:
        return container.demux(stream)
    key = int(before[-1])
    container.seek(int(index.key_times[key]), stream=stream, backward=True)
    return container.demux(stream)


