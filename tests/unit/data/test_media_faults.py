"""Files that are not what they say: refused with path, reason and index, the same by probe and by reading."""

from __future__ import annotations

import os
import resource
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.clips import cut_bytes, damage_bytes, frame_numbers, make_clip, picture, real_clip

from osora_cli.data import decode as decode_module
from osora_cli.data.frame_index import build_index, frame_rate
from osora_cli.data.index_cache import IndexCache
from osora_cli.data.media import MediaError, probe, read_frames
from osora_cli.errors import DataError


@pytest.mark.parametrize("fraction", [0.5, 0.8])
@pytest.mark.parametrize("ext", ["mp4", "mkv", "webm"])
def test_a_cut_file_counts_what_is_left(ext: str, fraction: float, tmp_path: Path) -> None:
    kind: dict[str, Any] = {"codec": "libvpx", "bframes": None} if ext == "webm" else {}
    whole = make_clip(tmp_path / f"whole.{ext}", frames=60, mux_options={"movflags": "faststart"}, **kind)
    cut = cut_bytes(whole, tmp_path / f"cut.{ext}", fraction)
    count = probe(cut).num_frames
    assert 15 < count < 55
    assert count == probe(cut, exact=True).num_frames == build_index(cut).num_frames
    numbers = frame_numbers(read_frames(cut, range(count)))
    # With B-frames the last of the packets left may be of a later frame than one that is gone.
    assert numbers[:-1] == list(range(count - 1))
    with pytest.raises(MediaError, match=rf"cut\.{ext}`: frame {count} is asked for, but it holds {count}"):
        read_frames(cut, [count])


def test_an_mp4_without_its_header_says_so(tmp_path: Path) -> None:
    cut = cut_bytes(make_clip(tmp_path / "whole.mp4"), tmp_path / "cut.mp4", 0.7)  # the header stands at the end
    for look in (probe, lambda path: read_frames(path, [0])):
        with pytest.raises(MediaError, match=r"cut\.mp4`: Invalid data"):
            look(cut)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
@pytest.mark.parametrize("ext", ["mp4", "mkv"])
def test_damage_in_the_middle_is_refused_and_not_shown(ext: str, codec: str, tmp_path: Path) -> None:
    path = make_clip(tmp_path / f"clip.{ext}", frames=60, codec=codec)
    clean = read_frames(path, range(60))
    target = _place_of_packet(path, 30)
    data = bytearray(path.read_bytes())
    data[target : target + 24] = b"\xa5" * 24
    path.write_bytes(data)
    whole, usable = probe(path).num_frames, probe(path, exact=True).num_frames
    assert whole == 60
    assert 24 <= usable <= 30, "the group of pictures that is hit begins at frame 24"
    assert np.array_equal(read_frames(path, range(usable)), clean[:usable])
    with pytest.raises(MediaError, match=rf"clip\.{ext}`: frame \d+ of 60 cannot be decoded"):
        read_frames(path, range(20, 40))
    # From the next key frame on all is well.
    assert np.array_equal(read_frames(path, [36, 48, 59]), clean[[36, 48, 59]])


def _place_of_packet(path: Path, number: int) -> int:
    """The byte at which a packet's slice data begin, past its length and headers."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        return path.read_bytes().index(bytes(packets[number])) + 6


def test_noise_in_a_transport_stream_never_gives_a_wrong_count(tmp_path: Path) -> None:
    path = damage_bytes(make_clip(tmp_path / "clip.ts", frames=60), 0.5, 200)
    usable = probe(path, exact=True).num_frames
    assert len(read_frames(path, range(usable))) == usable


def test_a_stream_that_begins_between_key_frames(tmp_path: Path) -> None:
    whole = make_clip(tmp_path / "whole.ts", frames=60).read_bytes()
    path = tmp_path / "captured.ts"
    path.write_bytes(whole[188 * 40 :])
    count = probe(path).num_frames
    assert count == probe(path, exact=True).num_frames == 36
    assert frame_numbers(read_frames(path, range(count))) == list(range(24, 60))
    assert frame_numbers(read_frames(path, [30])) == [54]


def test_streams_joined_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "joined.ts"
    parts = [make_clip(tmp_path / f"{first}.ts", frames=10, first=first) for first in (0, 10)]
    path.write_bytes(b"".join(part.read_bytes() for part in parts))  # the second part's timestamps start anew
    assert probe(path).num_frames == probe(path, exact=True).num_frames == 20
    assert frame_numbers(read_frames(path, range(20))) == list(range(20))


SIZE_CHANGES = {
    "change.webm": "libvpx",
    "change_vp9.webm": "libvpx-vp9",
    "change.mkv": "libx264",
    "change.mp4": "libx264",
    "change_mpeg2.mkv": "mpeg2video",
}


@pytest.mark.parametrize("name", SIZE_CHANGES)
def test_a_size_that_changes_in_mid_stream_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    _mux_two_sizes(path, SIZE_CHANGES[name])
    for look in (probe, lambda path: probe(path, exact=True), lambda path: read_frames(path, range(16))):
        with pytest.raises(MediaError, match=r"size changes in mid-stream: 160x96 at first, 96x160 at frame [78]"):
            look(path)


def _mux_two_sizes(path: Path, codec: str) -> None:
    options = {"deadline": "realtime", "cpu-used": "8"} if "vpx" in codec else {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        number = 0
        for size in ((160, 96), (96, 160)):
            encoder = av.CodecContext.create(codec, "w")
            encoder.width, encoder.height, encoder.pix_fmt = *size, "yuv420p"
            encoder.framerate, encoder.time_base, encoder.options = Fraction(24), Fraction(1, 24), options
            encoder.thread_count = 1
            packets = []
            for _ in range(8):
                frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24").reformat(format="yuv420p")
                frame.pts, frame.time_base = number, Fraction(1, 24)
                packets += encoder.encode(frame)
                number += 1
            for packet in packets + encoder.encode(None):
                packet.stream, packet.time_base = stream, Fraction(1, 24)
                container.mux(packet)


def test_no_video_in_it(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = 48000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(MediaError, match=r"no video stream \(it holds: audio\)"):
        probe(path)


def test_cover_art_is_no_film(tmp_path: Path) -> None:
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=48000)
        art = container.add_stream("mjpeg", rate=1)
        art.width, art.height, art.pix_fmt = 64, 64, "yuvj420p"
        art.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = 48000, 0
        container.mux(sound.encode(frame))
        image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        image.pts = 0
        container.mux(art.encode(image))
        container.mux(art.encode(None))
        container.mux(sound.encode(None))
    with pytest.raises(MediaError, match="its only video stream is cover art"):
        probe(path)


class _Claims:
    """What a stream's header says of its rate."""

    def __init__(self, average: Fraction | None, guessed: Fraction | None = None, base: Fraction | None = None) -> None:
        self.average_rate, self.guessed_rate, self.base_rate = average, guessed, base
        self.time_base = Fraction(1, 1000)


def test_a_rate_that_nothing_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of 0/0 or none falls back on the timestamps, then on what FFmpeg guesses; without any it is refused."""
    times = np.array([0, 40, 80, 120])
    for absent in (None, Fraction(0)):
        assert frame_rate(_Claims(absent), times, trusted=False) == 25.0  # type: ignore[arg-type]
        assert frame_rate(_Claims(absent), times, trusted=True) == 25.0  # type: ignore[arg-type]
        assert frame_rate(_Claims(absent, Fraction(30)), None, trusted=False) == 30.0  # type: ignore[arg-type]
        assert frame_rate(_Claims(absent, None, Fraction(12)), times[:1], trusted=False) == 12.0  # type: ignore[arg-type]
        assert frame_rate(_Claims(absent), None, trusted=False) is None  # type: ignore[arg-type]
    path = make_clip(tmp_path / "clip.mkv", frames=4)
    monkeypatch.setattr("osora_cli.data.frame_index.frame_rate", lambda *_, **__: None)
    with pytest.raises(MediaError, match=r"clip\.mkv`: its frame rate is unknown"):
        probe(path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a film\n" * 100)
    (tmp_path / "zeros.mp4").write_bytes(bytes(9000))
    (tmp_path / "dangling.mp4").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.mp4")  # opening it would wait for ever
    reasons = {
        "folder.mp4": "not a regular file",
        "empty.mp4": r"empty file \(0 bytes\)",
        "text.mp4": "Invalid data",
        "zeros.mp4": "Invalid data",
        "dangling.mp4": "no such file",
        "missing.mp4": "no such file",
        "pipe.mp4": "not a regular file",
    }
    for name, reason in reasons.items():
        for look in (probe, lambda path: read_frames(path, [0])):
            with pytest.raises(MediaError, match=reason) as caught:
                look(tmp_path / name)
            assert caught.value.path == tmp_path / name
            assert isinstance(caught.value, DataError)
            assert caught.value.exit_code == 3


def test_indices_that_cannot_be(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", frames=5)
    with pytest.raises(ValueError, match="start at 0, got -1"):
        read_frames(path, [-1])
    with pytest.raises(ValueError, match="at least one"):
        read_frames(path, [])


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", frames=5)
    assert frame_numbers(read_frames(path, [4])) == [4]
    make_clip(tmp_path / "other.mp4", frames=9, first=100).replace(path)
    assert frame_numbers(read_frames(path, [8])) == [108]


def test_the_cache_of_indexes_is_bounded(tmp_path: Path) -> None:
    cache = IndexCache(limit=400)
    paths = [make_clip(tmp_path / f"{number}.mp4", frames=20) for number in range(6)]
    for path in paths:
        cache.get(path)
    assert len(cache) == 3
    assert cache.get(paths[-1]) is cache.get(paths[-1])


def test_only_the_span_is_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", frames=120, gop=12)
    decoded: list[int] = []
    inner = decode_module.decode

    def counting(stream: Any, packets: Any, **kwargs: Any) -> Any:
        for frame in inner(stream, packets, **kwargs):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(decode_module, "decode", counting)
    read_frames(path, [62, 65])
    assert len(decoded) == 6, "from the key frame 60 to frame 65"


def test_reading_leaves_no_file_open_and_no_memory_behind(tmp_path: Path) -> None:
    path = real_clip("carphone_pristine")
    broken = damage_bytes(make_clip(tmp_path / "broken.mp4", frames=60), 0.4, 300)

    def use() -> None:
        read_frames(path, [10])
        for look in (probe, lambda file: read_frames(file, range(60))):
            try:
                look(broken)
            except MediaError:
                pass

    for _ in range(20):
        use()
    opened, memory = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        use()
    assert len(os.listdir("/proc/self/fd")) == opened
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000, "in kB"
