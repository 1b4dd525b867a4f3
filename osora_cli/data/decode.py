"""Reading chosen frames: decodes from the key frame before the first wanted one to the last wanted one, no further."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from osora_cli.data.frame_index import NO_TIME, FrameIndex, check_size
from osora_cli.data.index_cache import frame_index
from osora_cli.data.media_types import AnyPath, MediaError, is_still
from osora_cli.data.pixels import rgb_of
from osora_cli.data.stills import read_still
from osora_cli.data.streams import decode, open_video, packets_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream


def read_frames(path: AnyPath, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
    """Frames of a video or still, by their place in display order.

    Only the wanted frames are held. What the decoder refuses, or marks as damaged, is an error and never passed on.

    Args:
        path: the file.
        indices: frame numbers from 0, in any order, repeats allowed; at least one.

    Returns:
        `[len(indices), H, W, 3]` uint8 RGB in displayed orientation, in the order of `indices`.

    Raises:
        MediaError: with path and index, when the file holds fewer frames, a frame cannot be decoded, or the picture's
            size changes in mid-stream; with path and reason when it is not a video or still.
    """
    order = np.asarray(indices, dtype=np.int64)
    if order.ndim != 1 or order.size == 0:
        raise ValueError(f"frame numbers must be a list of at least one, got shape {list(order.shape)}")
    wanted = np.unique(order)
    if wanted[0] < 0:
        raise ValueError(f"frame numbers start at 0, got {wanted[0]}")
    if is_still(path):
        _check_range(path, wanted, 1)
        return np.repeat(read_still(path)[None], len(order), axis=0)
    index = frame_index(path)
    _check_range(path, wanted, index.num_frames)
    out = _read(path, index, wanted)
    rows = np.searchsorted(wanted, order)
    return out if np.array_equal(rows, np.arange(len(wanted))) else out[rows]


def _check_range(path: AnyPath, wanted: NDArray[np.int64], num_frames: int) -> None:
    if wanted[-1] >= num_frames:
        raise MediaError(path, f"frame {wanted[-1]} is asked for, but it holds {num_frames} (numbered from 0)")


def _read(path: AnyPath, index: FrameIndex, wanted: NDArray[np.int64]) -> NDArray[np.uint8]:
    """`[len(wanted), H, W, 3]` for rising frame numbers."""
    out = np.empty((len(wanted), index.height, index.width, 3), dtype=np.uint8)
    missing = _fill(path, index, wanted, out, from_start=False)
    if missing is not None:
        # Some streams mark key frames where decoding cannot start, or refer to what is before them.
        missing = _fill(path, index, wanted, out, from_start=True)
    if missing is not None:
        raise MediaError(path, f"frame {missing} of {index.num_frames} cannot be decoded: the file is damaged there")
    return out


def _fill(
    path: AnyPath,
    index: FrameIndex,
    wanted: NDArray[np.int64],
    out: NDArray[np.uint8],
    *,
    from_start: bool,
) -> int | None:
    """Decodes into `out`. Returns the first wanted frame that did not come whole, or None."""
    rows = {int(number): row for row, number in enumerate(wanted)}
    last = int(wanted[-1])
    with open_video(path) as (container, stream):
        for number, frame in _numbered(container, stream, index, int(wanted[0]), from_start=from_start):
            if number in rows and not frame.is_corrupt:
                check_size(path, index, number, frame.height, frame.width)
                out[rows.pop(number)] = index.orientation.apply(rgb_of(frame))
            if number >= last:
                break
    return min(rows) if rows else None


def _numbered(
    container: InputContainer, stream: VideoStream, index: FrameIndex, first: int, *, from_start: bool
) -> Iterator[tuple[int, VideoFrame]]:
    """Decoded frames with their place in display order, from `first` or before it."""
    if index.times is None:
        yield from enumerate(decode(stream, packets_of(container, stream), lenient_start=True))
        return
    key = int(np.searchsorted(np.sort(index.key_times), index.times[first], side="right")) - 1
    if from_start or key <= 0:
        frames = decode(stream, packets_of(container, stream), lenient_start=True)
    else:
        frames = decode(stream, _from_key(container, stream, index, first), lenient_start=False)
    for frame in frames:
        number = int(np.searchsorted(index.times, NO_TIME if frame.pts is None else frame.pts))
        if number < index.num_frames and index.times[number] == frame.pts:
            yield number, frame


def _from_key(
    container: InputContainer, stream: VideoStream, index: FrameIndex, first: int
) -> Iterator[Packet[VideoStream]]:
    """Packets from the last key frame that is shown at or before frame `first`; none if it is not found.

    Frames shown after a key frame need nothing from before it; those that lead it in display order may.
    """
    assert index.times is not None
    key = int(np.flatnonzero(index.key_times <= index.times[first])[-1])
    time, decoding_time = int(index.key_times[key]), int(index.key_dts[key])
    targets = [time] if decoding_time in (NO_TIME, time) else [time, decoding_time]
    for target in targets:
        try:
            container.seek(target, stream=stream, backward=True)
        except (av.FFmpegError, OSError):
            continue
        packets = packets_of(container, stream)
        for packet in packets:
            if packet.is_keyframe and packet.pts == time:
                yield packet
                yield from packets
                return
            if _is_after(packet, time, decoding_time):
                break
    return


def _is_after(packet: Packet[VideoStream], time: int, decoding_time: int) -> bool:
    """Whether a packet follows the key frame in decode order, so that the seek went too far."""
    if packet.dts is not None and decoding_time != NO_TIME:
        return packet.dts > decoding_time
    return packet.is_keyframe and packet.pts is not None and packet.pts > time
