"""Every kind of container and stream: what probe says is what read_frames gives, and both are what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.clips import decode_all, frame_numbers, make_clip, picture, real_clip, real_clips, trim_by_edit_list

from osora_cli.data.decode import read_frames
from osora_cli.data.frame_index import build_index
from osora_cli.data.media import MediaError, MediaInfo, probe

GIF = {"codec": "gif", "pix_fmt": "rgb8", "bframes": None, "fps": 20}
VP8 = {"codec": "libvpx", "bframes": None}
VP9 = {"codec": "libvpx-vp9", "bframes": None}
ALT_REF = {"options": {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "cpu-used": "5"}}
OPEN_GOP = {"options": {"x264-params": "open-gop=1"}}
HEVC_OPEN = {"codec": "libx265", "options": {"x265-params": "open-gop=1:keyint=10:bframes=4:log-level=none"}}
TIMES = [0, 40] + [40 + 97 * k for k in range(1, 39)]

KINDS: dict[str, dict[str, Any]] = {
    "plain.mp4": {},
    "plain.mov": {},
    "plain.mkv": {},
    "plain.ts": {},
    "plain.flv": {},
    "faststart.mp4": {"mux_options": {"movflags": "faststart"}},
    "fragments.mp4": {"mux_options": {"movflags": "frag_keyframe+empty_moov"}},
    # The header lists the first fragment's frames only.
    "fragments_after_header.mp4": {"mux_options": {"movflags": "frag_keyframe"}},
    "raw.h264": {},
    "raw.hevc": {"codec": "libx265"},
    "hevc.mp4": {"codec": "libx265"},
    "hevc.mkv": {"codec": "libx265"},
    "vp8.webm": VP8,
    "vp8_hidden_frames.webm": {**VP8, **ALT_REF},
    "vp9.webm": VP9,
    "vp9_hidden_frames.webm": {**VP9, **ALT_REF},
    "mpeg2.mpg": {"codec": "mpeg2video"},
    "mpeg2.ts": {"codec": "mpeg2video"},
    "mpeg4.avi": {"codec": "mpeg4", "bframes": 0},
    "mpeg4_bframes.avi": {"codec": "mpeg4", "bframes": 2},
    # AVI stores no times of presentation; FFmpeg makes up wrong ones here.
    "h264.avi": {},
    "motion_jpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p", "bframes": None},
    "wmv.wmv": {"codec": "wmv2", "bframes": None},
    "lossless.mkv": {"codec": "ffv1", "bframes": None},
    "moving.gif": GIF,
    "open_gop.mp4": OPEN_GOP,
    "open_gop.ts": OPEN_GOP,
    "open_gop_hevc.mp4": HEVC_OPEN,
    "open_gop_hevc.ts": HEVC_OPEN,
    "intra_refresh.mp4": {"options": {"x264-params": "intra-refresh=1"}},
    "interlaced.ts": {"options": {"x264-params": "interlaced=1"}},
    "pyramid.mp4": {"bframes": 5, "gop": 9, "options": {"x264-params": "b-pyramid=normal"}},
    "all_key_frames.mp4": {"gop": 1},
    "one_frame.mp4": {"frames": 1},
    "one_frame.mkv": {"frames": 1},
    "two_frames.mkv": {"frames": 2},
    "sound.mp4": {"audio": True},
    "sound.mkv": {"audio": True},
    "sound.ts": {"audio": True},
    "cover.mp4": {"cover": True},
    "cover_as_track.mkv": {"cover": True},
    "turned_90.mp4": {"rotate": 90},
    "turned_180.mov": {"rotate": 180},
    "turned_270.mp4": {"rotate": 270},
    "mirrored.mp4": {"mirror": True},
    "mirrored_90.mp4": {"mirror": True, "rotate": 90},
    "variable.mp4": {"times": TIMES},
    "variable.mkv": {"times": TIMES},
    "variable.ts": {"times": TIMES},
    "ntsc.mp4": {"fps": 30000 / 1001},
    "ntsc.mkv": {"fps": 24000 / 1001},
    "ten_bits.mp4": {"pix_fmt": "yuv420p10le"},
    "ten_bits_422.mov": {"codec": "prores_ks", "pix_fmt": "yuv422p10le", "bframes": None},
    "colour_444.mkv": {"pix_fmt": "yuv444p"},
    "long.mkv": {"frames": 150, "gop": 50},
    "long.ts": {"frames": 150, "gop": 50},
}


def expected_rate(kind: dict[str, Any]) -> float:
    if "times" in kind:
        return 39 / 3.726
    return round(float(kind.get("fps", 24)), 3)


@pytest.mark.parametrize("name", KINDS)
def test_probe_and_reading_agree_with_what_was_written(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    frames = kind.get("frames", 40)
    path = make_clip(tmp_path / name, **kind)
    info = probe(path)
    assert (info.num_frames, info.height, info.width, info.is_image) == (frames, 64, 96, False)
    # An mp4's rate is its count over its duration, and the last frame's duration is the muxer's guess.
    assert info.fps == pytest.approx(expected_rate(kind), rel=0.04 if name == "variable.mp4" else 5e-4)
    index = build_index(path)
    assert MediaInfo(index.num_frames, index.height, index.width, round(index.fps, 3), is_image=False) == info
    assert probe(path, exact=True) == info
    whole = read_frames(path, range(frames))
    assert frame_numbers(whole) == list(range(frames))
    for start in range(0, frames, 7):
        span = list(range(start, min(start + 3, frames)))
        assert np.array_equal(read_frames(path, span), whole[span])
    with pytest.raises(MediaError, match=rf"frame {frames} is asked for, but it holds {frames}"):
        read_frames(path, [frames])


@pytest.mark.parametrize("path", real_clips(), ids=lambda path: path.stem)
def test_real_clips(path: Path) -> None:
    whole = decode_all(path)
    info = probe(path)
    assert (info.num_frames, info.height, info.width) == whole.shape[:3]
    with av.open(str(path)) as container:
        assert info.fps == round(float(container.streams.video[0].average_rate), 3)
    for span in ([0], [len(whole) - 1], [5, 3, 3, 90], list(range(60, 77))):
        assert np.array_equal(read_frames(path, span), whole[span])


def test_facts_of_the_real_clips() -> None:
    assert probe(real_clip("bigbuckbunny")) == MediaInfo(132, 720, 1280, 25.0, is_image=False)
    assert probe(real_clip("bikes")) == MediaInfo(250, 272, 640, 25.0, is_image=False)
    assert probe(real_clip("carphone_pristine")) == MediaInfo(120, 144, 176, 29.97, is_image=False)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
@pytest.mark.parametrize("bframes", [0, 3])
def test_an_edit_list_hides_frames_at_both_ends(codec: str, bframes: int, tmp_path: Path) -> None:
    path = make_clip(tmp_path / "trimmed.mp4", frames=60, codec=codec, bframes=bframes)
    trim_by_edit_list(path, start=13, frames=35, fps=24)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 60
    assert probe(path).num_frames == probe(path, exact=True).num_frames == build_index(path).num_frames == 35
    assert frame_numbers(read_frames(path, range(35))) == list(range(13, 48))
    assert frame_numbers(read_frames(path, [34, 0, 20])) == [47, 13, 33]


@pytest.mark.parametrize("ext", ["mp4", "mkv", "ts", "avi"])
def test_indices_in_any_order_with_repeats(ext: str, tmp_path: Path) -> None:
    path = make_clip(tmp_path / f"clip.{ext}")
    assert frame_numbers(read_frames(path, [30, 2, 2, 39, 0, 30])) == [30, 2, 2, 39, 0, 30]
    assert frame_numbers(read_frames(path, np.array([7, 5]))) == [7, 5]


def test_the_largest_film_is_taken_of_several_streams(tmp_path: Path) -> None:
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as container:
        kinds = [((96, 64), 12), ((160, 96), 20)]
        streams = [container.add_stream("libx264", rate=24) for _ in kinds]
        for stream, (size, _) in zip(streams, kinds, strict=True):
            stream.width, stream.height, stream.pix_fmt, stream.max_b_frames = *size, "yuv420p", 0
        for stream, (size, frames) in zip(streams, kinds, strict=True):
            for number in range(frames):
                frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    assert probe(path) == MediaInfo(20, 96, 160, 24.0, is_image=False)
    assert frame_numbers(read_frames(path, [3, 19])) == [3, 19]


NAMES = ["-dash.mp4", "a, b.mp4", "new\nline.mp4", "50%03d.mp4", "#hash?x=1&y.mp4", "http:x.mp4", "grün 影.mp4"]


@pytest.mark.parametrize("name", NAMES)
def test_any_legal_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_clip(tmp_path / "plain.mp4", frames=6).rename(tmp_path / name)
    assert probe(name).num_frames == 6
    assert frame_numbers(read_frames(Path(name), [5, 1])) == [5, 1]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = Path(str(tmp_path) + "/b\udcffd.mp4")
    make_clip(tmp_path / "plain.mp4", frames=6).rename(path)
    assert probe(path).num_frames == 6
    assert frame_numbers(read_frames(path, [5])) == [5]
