"""Which frames a video shows, and at which timestamps: the one truth that probing and reading share.

A demux scan lists every packet without decoding it. Packets that an edit list hides are marked by the demuxer and not
counted. Where packets do not tell the frames (a stream that begins between key frames, hidden frames, parameters that
change), the stream is decoded once to know.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from osora_cli.data.media_types import MediaError
from osora_cli.data.streams import Orientation, error_text, open_video, orientation_of

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_NO_TIME = np.iinfo(np.int64).min


@dataclass
class PacketScan:
    """What a demux scan saw, in decode order. Times are in the stream's time base; a missing one is `_NO_TIME`."""

    pts: list[int] = field(default_factory=list)
    dts: list[int] = field(default_factory=list)
    keys: list[bool] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    last_duration: int = 0

    def add(self, packet: Packet, *, shown: bool) -> None:
        self.pts.append(_NO_TIME if packet.pts is None else packet.pts)
        self.dts.append(_NO_TIME if packet.dts is None else packet.dts)
        self.keys.append(packet.is_keyframe)
        self.shown.append(shown)
        self.last_duration = packet.duration or self.last_duration


@dataclass(frozen=True)
class FrameIndex:
    """The frames of one video, in display order.

    Attributes:
        num_frames: frames shown.
        height, width: as displayed, in pixels.
        orientation: how decoded pictures are turned.
        fps: average rate, frames per second.
        times: `[num_frames]` timestamps in display order, strictly rising; None when the container's timestamps do
            not tell frames apart, and frames have to be counted from the start.
        key_times, key_dts: presentation and decode timestamps of the packets where decoding can start.
    """

    num_frames: int
    height: int
    width: int
    orientation: Orientation
    fps: float
    times: NDArray[np.int64] | None
    key_times: NDArray[np.int64]
    key_dts: NDArray[np.int64]


def _first_frame(stream: VideoStream, packets: list[Packet]) -> VideoFrame | None:
    """Decodes the packet, and lets go of what the decoder holds back, so that one picture costs one picture."""
    codec = stream.codec_context
    frames = codec.decode(packets[-1]) if len(packets) == 1 else []
    if not frames and len(packets) == 1:
        frames = codec.decode(None)
        codec.flush_buffers()
        if not frames:
            codec.decode(packets[-1])
    elif len(packets) > 1:
        frames = codec.decode(packets[-1])
    return frames[0] if frames else None


def build_index(path: str | os.PathLike[str]) -> FrameIndex:
    """Scans a video without using what was found out before.

    Raises:
        MediaError: not a video that can be read, with the reason.
    """
    scan = PacketScan()
    first: VideoFrame | None = None
    head: list[Packet] = []
    with open_video(path) as (container, stream):
        for packet in container.demux(stream):
            if first is None:
                head.append(packet)
                first = _first_frame(stream, head)
            if packet.size == 0:
                continue
            scan.add(packet, shown=not packet.is_discard)
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate
        time_base = stream.time_base
    if first is None:
        raise MediaError(path, "no frame can be decoded")
    pts = np.asarray(scan.pts, dtype=np.int64)
    shown = np.asarray(scan.shown, dtype=bool)
    keys = np.asarray(scan.keys, dtype=bool)
    times: NDArray[np.int64] | None = np.sort(pts[shown])
    if times is None or (times == _NO_TIME).any() or (np.diff(times) <= 0).any():
        times = None
    orientation = orientation_of(first)
    height, width = orientation.size(first.height, first.width)
    if not rate:
        raise MediaError(path, f"no frame rate (time base {time_base})")
    return FrameIndex(
        num_frames=int(shown.sum()),
        height=height,
        width=width,
        orientation=orientation,
        fps=float(rate),
        times=times,
        key_times=pts[keys],
        key_dts=np.asarray(scan.dts, dtype=np.int64)[keys],
    )


class _IndexCache:
    """Indexes of the files read last, bounded by the number of timestamps held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._entries: OrderedDict[tuple[str, int, int], FrameIndex] = OrderedDict()
        self._lock = Lock()

    def get(self, path: str | os.PathLike[str]) -> FrameIndex:
        key = self._key(path)
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found
        index = build_index(path)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = index
                self._held += index.num_frames
            while self._held > self._limit and len(self._entries) > 1:
                _, old = self._entries.popitem(last=False)
                self._held -= old.num_frames
        return index

    @staticmethod
    def _key(path: str | os.PathLike[str]) -> tuple[str, int, int]:
        name = os.path.abspath(path)
        try:
            status = Path(name).stat()
        except (OSError, ValueError) as error:
            raise MediaError(Path(path), error_text(error)) from error
        return name, status.st_mtime_ns, status.st_size


# 8 MB of timestamps in each process: some four thousand clips of ten seconds.
_CACHE = _IndexCache(limit=1_000_000)


def frame_index(path: str | os.PathLike[str]) -> FrameIndex:
    """The index of a video, remembered in this process until the file changes."""
    return _CACHE.get(path)
