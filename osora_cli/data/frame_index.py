"""Which frames a video shows, and at which timestamps: the one truth that probing and reading share.

A demux scan lists every packet without decoding it. Packets that an edit list hides are marked by the demuxer and not
counted, nor is one that the end of the file cuts off. Where packets do not tell the frames (a stream that begins
between key frames, parameters that change), the stream is decoded once to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from osora_cli.data.bitstream import has_lengths, is_hidden, is_packed, picture_parameters
from osora_cli.data.iso import IsoHeader, read_iso_header
from osora_cli.data.media_types import AnyPath, MediaError
from osora_cli.data.orientation import Orientation
from osora_cli.data.streams import decode, open_video, packets_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

NO_TIME = np.iinfo(np.int64).min
# The average that a header claims is checked against the timestamps, which some containers round to milliseconds.
_RATE_TOLERANCE = 0.02
# Pictures that lead the first key frame follow it at once; no codec reorders over more.
REORDER = 20


@dataclass(frozen=True)
class FrameIndex:
    """The frames of one video, in display order.

    Attributes:
        num_frames: frames shown.
        height, width: as displayed, in pixels.
        orientation: how decoded pictures are turned.
        fps: average rate, frames per second.
        times: `[num_frames]` timestamps, strictly rising; None when the container's timestamps do not tell frames
            apart, and frames have to be counted from the start.
        key_times, key_dts: timestamps of presentation and of decoding of the packets where decoding can start.
    """

    num_frames: int
    height: int
    width: int
    orientation: Orientation
    fps: float
    times: NDArray[np.int64] | None
    key_times: NDArray[np.int64]
    key_dts: NDArray[np.int64]


@dataclass
class PacketScan:
    """What a demux scan saw, in decode order. Times are in the stream's time base; a missing one is `NO_TIME`."""

    codec: str
    lengths: bool = False
    pts: list[int] = field(default_factory=list)
    dts: list[int] = field(default_factory=list)
    keys: list[bool] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    parameters: bytes | None = None
    doubt: str | None = None

    @classmethod
    def of(cls, stream: VideoStream) -> PacketScan:
        return cls(stream.codec_context.name, has_lengths(stream.codec_context.extradata))

    def add(self, packet: Packet[VideoStream]) -> None:
        key, pts, dts = packet.is_keyframe, packet.pts, packet.dts
        self.pts.append(NO_TIME if pts is None else pts)
        self.dts.append(NO_TIME if dts is None else dts)
        self.keys.append(key)
        self.cut.append(packet.is_corrupt)
        hidden = self.codec == "vp8" and is_hidden(self.codec, memoryview(packet))
        self.shown.append(not (packet.is_discard or hidden))
        if key:
            self._look_into(packet)

    def _look_into(self, packet: Packet[VideoStream]) -> None:
        view = memoryview(packet)
        parameters = picture_parameters(self.codec, view, lengths=self.lengths)
        if self.parameters is None:
            self.parameters = parameters
            if is_packed(self.codec, view):
                self.doubt = "packets hold more than one frame"
        elif parameters != self.parameters:
            self.doubt = "the picture's parameters change"

    def end(self) -> None:
        """Takes the packets back that the end of the file cuts off, and looks at how the stream begins."""
        for place in range(len(self.cut) - 1, -1, -1):
            if not self.cut[place]:
                break
            self.shown[place] = False
        self.doubt = self.doubt or doubtful_start(self.pts, self.keys, self.shown)


def doubtful_start(pts: list[int], keys: list[bool], shown: list[bool]) -> str | None:
    """Why the first packets may not all give a frame, or None."""
    first = next((place for place, key in enumerate(keys) if key), None)
    if first is None:
        return "no key frame is marked"
    if any(shown[:first]):
        return "the stream begins between key frames"
    after = range(first, min(first + REORDER, len(pts)))
    if any(shown[place] and NO_TIME < pts[place] < pts[first] for place in after):
        return "frames lead the first key frame"
    return None


def build_index(path: AnyPath, *, exact: bool = False) -> FrameIndex:
    """Scans a video without using what was found out before.

    Args:
        path: the file.
        exact: decode everything, and count the frames up to the first damage.

    Raises:
        MediaError: not a video that can be read, with the reason.
    """
    iso = read_iso_header(path)
    with open_video(path) as (container, stream):
        scan = PacketScan.of(stream)
        first_key: Packet[VideoStream] | None = None
        for packet in packets_of(container, stream):
            scan.add(packet)
            if first_key is None and scan.keys[-1]:
                first_key = packet
        scan.end()
        times = _times(scan, ordered=_tells_order(container, scan))
        orientation, height, width = _geometry(path, stream, iso, first_key)
        fps = frame_rate(stream, times, trusted=iso is not None and not iso.fragmented)
    if fps is None:
        raise MediaError(path, "its frame rate is unknown")
    keys = np.asarray(scan.keys, dtype=bool)
    index = FrameIndex(
        num_frames=sum(scan.shown),
        height=height,
        width=width,
        orientation=orientation,
        fps=fps,
        times=times,
        key_times=np.asarray(scan.pts, dtype=np.int64)[keys],
        key_dts=np.asarray(scan.dts, dtype=np.int64)[keys],
    )
    if exact or scan.doubt is not None:
        index = _decoded(path, index, believed=scan.doubt is None)
    if index.num_frames == 0:
        raise MediaError(path, "no frame can be decoded")
    return index


def _tells_order(container: InputContainer, scan: PacketScan) -> bool:
    """AVI stores no times of presentation: FFmpeg makes them up, and wrongly where frames are reordered."""
    return container.format.name != "avi" or all(scan.keys)


def _times(scan: PacketScan, *, ordered: bool) -> NDArray[np.int64] | None:
    pts = np.asarray(scan.pts, dtype=np.int64)[np.asarray(scan.shown, dtype=bool)]
    if not ordered or (pts == NO_TIME).all():
        return None
    times = np.sort(pts)
    if (times == NO_TIME).any() or (np.diff(times) <= 0).any():
        scan.doubt = scan.doubt or "timestamps repeat or are missing"
        return None
    return times


def _geometry(
    path: AnyPath, stream: VideoStream, iso: IsoHeader | None, first_key: Packet[VideoStream] | None
) -> tuple[Orientation, int, int]:
    """Orientation, displayed height and displayed width: from the header of an mp4 or mov, else from one picture."""
    known = header_geometry(stream, iso)
    if known is not None:
        return known
    frame = None if first_key is None else next(decode(stream, [first_key], lenient_start=True), None)
    if frame is None:
        with open_video(path) as (again, film):
            frame = next(decode(film, packets_of(again, film), lenient_start=True), None)
    if frame is None:
        raise MediaError(path, "no frame can be decoded")
    orientation = Orientation.of_frame(frame)
    return orientation, *orientation.size(frame.height, frame.width)


def header_geometry(stream: VideoStream, iso: IsoHeader | None) -> tuple[Orientation, int, int] | None:
    """Orientation, displayed height and displayed width as an mp4 or mov header tells them, or None."""
    if iso is None or stream.id not in iso.orientations or not (stream.height and stream.width):
        return None
    orientation = iso.orientations[stream.id]
    return orientation, *orientation.size(stream.height, stream.width)


def frame_rate(stream: VideoStream, times: NDArray[np.int64] | None, *, trusted: bool) -> float | None:
    """Average frames per second, or None when nothing tells it.

    Args:
        stream: whose header claims an average.
        times: of the frames shown. They decide where the claim is off by more than rounding explains, as it is for
            a variable rate in Matroska.
        trusted: the claim is a count divided by a duration, and stands.
    """
    average = stream.average_rate
    if trusted and average:
        return float(average)
    measured = _measured_rate(stream.time_base, times)
    if measured is not None:
        close = average and abs(float(average) / measured - 1) <= _RATE_TOLERANCE
        return float(average) if average and close else measured
    # Where nothing is timed, as in a raw stream, FFmpeg's average is a default and its guess comes from the stream.
    claimed = (stream.guessed_rate or average) if times is None else (average or stream.guessed_rate)
    claimed = claimed or stream.base_rate
    return float(claimed) if claimed else None


def _measured_rate(time_base: Fraction | None, times: NDArray[np.int64] | None) -> float | None:
    if times is None or len(times) < 2 or not time_base:
        return None
    return float((len(times) - 1) / (int(times[-1] - times[0]) * time_base))


def _decoded(path: AnyPath, index: FrameIndex, *, believed: bool) -> FrameIndex:
    """The index with what decoding from start to end gives, up to the first damage.

    Args:
        believed: the packets tell the frames; only those that come, in their order and without a gap, are kept.
    """
    found: list[int] = []
    with open_video(path) as (container, stream):
        for frame in decode(stream, packets_of(container, stream), lenient_start=True):
            check_size(path, index, len(found), frame.height, frame.width)
            if frame.is_corrupt and believed:
                break
            found.append(NO_TIME if frame.pts is None else frame.pts)
    times = np.asarray(found, dtype=np.int64)
    if not believed:
        rising = index.times is not None and not (times == NO_TIME).any() and bool((np.diff(times) > 0).all())
        return replace(index, num_frames=len(times), times=times if rising else None)
    if index.times is None:
        return replace(index, num_frames=min(len(times), index.num_frames))
    common = min(len(times), len(index.times))
    same = times[:common] == index.times[:common]
    count = common if same.all() else int(np.argmin(same))
    return replace(index, num_frames=count, times=index.times[:count])


def check_size(path: AnyPath, index: FrameIndex, number: int, height: int, width: int) -> None:
    """Refuses a decoded picture of another size than the film's.

    Raises:
        MediaError: says both sizes, as displayed, and at which frame.
    """
    if index.orientation.size(height, width) == (index.height, index.width):
        return
    height, width = index.orientation.size(height, width)
    raise MediaError(
        path,
        f"the picture's size changes in mid-stream: {index.width}x{index.height} at first, {width}x{height} at frame "
        f"{number} (width x height)",
    )
