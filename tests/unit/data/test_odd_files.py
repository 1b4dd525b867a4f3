"""Odd files from `data meta` to the pixels of the loader: a batch holds what the table says, or the file is named."""

from __future__ import annotations

import logging
import multiprocessing.synchronize
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from support.clips import cut_bytes, frame_numbers, make_clip, picture, trim_by_edit_list

from osora_cli.app.data.meta import make_meta
from osora_cli.data.clip_reader import Failure
from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.media import MediaError, probe, read_frames
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError

SIZE = (96, 64)
TIMES = [0, 40] + [40 + 97 * k for k in range(1, 29)]


def _two_films(path: Path) -> None:
    with av.open(str(path), "w") as container:
        kinds = [((64, 48), 12), (SIZE, 30)]
        streams: list[Any] = [container.add_stream("libx264", rate=24) for _ in kinds]
        for stream, (size, _) in zip(streams, kinds, strict=True):
            stream.width, stream.height, stream.pix_fmt, stream.max_b_frames = *size, "yuv420p", 0
        for stream, (size, frames) in zip(streams, kinds, strict=True):
            for number in range(frames):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")))
            container.mux(stream.encode(None))


# Every one is shown as 96x64; the number is of its first frame.
ODD: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "turned 90.mp4": (lambda path: make_clip(path, 30, SIZE, rotate=90), 30, 0),
    "turned 270.mov": (lambda path: make_clip(path, 30, SIZE, rotate=270), 30, 0),
    "trimmed.mp4": (lambda path: trim_by_edit_list(make_clip(path, 60, SIZE), 13, 30, 24), 30, 13),
    "variable.mkv": (lambda path: make_clip(path, 30, SIZE, times=TIMES), 30, 0),
    "ten bits.mp4": (lambda path: make_clip(path, 30, SIZE, pix_fmt="yuv420p10le"), 30, 0),
    "two films.mkv": (_two_films, 30, 0),
    "with sound and cover.mp4": (lambda path: make_clip(path, 30, SIZE, audio=True, cover=True), 30, 0),
    "no count.webm": (lambda path: make_clip(path, 30, SIZE, codec="libvpx", bframes=None), 30, 0),
    "fragments.mp4": (lambda path: make_clip(path, 30, SIZE, mux_options={"movflags": "frag_keyframe"}), 30, 0),
    "b frames, h264.avi": (lambda path: make_clip(path, 30, SIZE), 30, 0),
}


def _stills(folder: Path) -> None:
    colour = Image.fromarray(picture(5, SIZE))
    turned = Image.Exif()
    turned[0x0112] = 6
    lying = Image.fromarray(np.ascontiguousarray(np.rot90(picture(5, SIZE))))
    lying.save(folder / "exif.png", exif=turned)
    colour.convert("P", palette=Image.Palette.ADAPTIVE).save(folder / "palette.png")
    colour.convert("L").save(folder / "grey.png")
    colour.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    clear = colour.copy()
    clear.putalpha(255)
    clear.save(folder / "alpha.png")


def _read(table: ClipTable, batches: list[Batch], **options: Any) -> list[ClipBatch]:
    with closing(ClipLoader(table, seed=1, fps_max=None, **options)) as reader:
        return list(reader.read(batches, 0))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ClipTable:
    folder = tmp_path_factory.mktemp("odd")
    for name, (make, _, _) in ODD.items():
        make(folder / name)
    _stills(folder)
    result = make_meta(folder, folder / "table.csv")
    assert result.bad == []
    return ClipTable.load(folder / "table.csv")


def test_the_table_says_what_is_shown(table: ClipTable) -> None:
    for row in range(len(table)):
        frames = ODD[table.path_of(row)][1] if table.path_of(row) in ODD else 1
        assert (table.num_frames[row], table.height[row], table.width[row]) == (frames, 64, 96), table.path_of(row)
    assert table.fps[table.path.to_pylist().index("variable.mkv")] == pytest.approx(29 / 2.756, abs=1e-3)


@pytest.mark.parametrize("workers", [0, 2])
def test_clips_and_stills_of_one_table_come_as_they_are_shown(table: ClipTable, workers: int) -> None:
    videos = [row for row in range(len(table)) if table.path_of(row) in ODD]
    stills = [row for row in range(len(table)) if row not in videos]
    assert (len(videos), len(stills)) == (len(ODD), 5)
    # All frames of each: the last one is there, too.
    batches = [Batch((row,), 30, 64, 96, (row,), np.array([row])) for row in videos]
    batches.append(Batch(tuple(stills), 1, 64, 96, tuple(stills), np.array(stills)))
    *films, pictures = _read(table, batches, num_workers=workers, max_bad_fraction=0)
    for row, batch in zip(videos, films, strict=True):
        frames = batch.video[0].permute(1, 2, 3, 0).numpy()
        first = ODD[table.path_of(row)][2]
        assert frame_numbers(frames) == list(range(first, first + 30)), table.path_of(row)
        assert batch.replaced == batch.shortened == ()
    assert pictures.fps == (0,) * 5
    for place, row in enumerate(stills):
        image = pictures.video[place, :, 0].permute(1, 2, 0).numpy().astype(int)
        wanted = picture(5, SIZE).astype(int)
        if table.path_of(row) == "grey.png":
            wanted = np.asarray(Image.fromarray(picture(5, SIZE)).convert("L").convert("RGB")).astype(int)
        # A palette of 256 colours and JPEG come near, the others are exact.
        assert np.abs(image - wanted).mean() < 6, table.path_of(row)


def test_height_by_width_is_one_rule_everywhere(tmp_path: Path) -> None:
    make_clip(tmp_path / "wide.mp4", 4, (320, 240))
    make_clip(tmp_path / "tall.mp4", 4, (240, 320))
    make_meta(tmp_path, tmp_path / "t.csv")
    table = ClipTable.load(tmp_path / "t.csv")
    assert dict(zip(table.path.to_pylist(), table.aspect_ratio.tolist(), strict=True)) == {
        "tall.mp4": 320 / 240, "wide.mp4": 0.75,
    }  # fmt: skip
    assert table.resolution.tolist() == [76800, 76800]
    assert table.notes == ()


# -- damaged: one policy, the same for the table and for the loader ----------------------------------------------------


def _hit(path: Path, packet_number: int) -> Path:
    """Breaks a packet's slice data."""
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    at = data.index(packets[packet_number]) + 6
    data[at : at + 24] = b"\xa5" * 24
    path.write_bytes(data)
    return path


def test_damage_in_mid_file_is_replaced_by_the_loader_and_counted_by_exact(tmp_path: Path) -> None:
    path = _hit(make_clip(tmp_path / "hit.mp4", 60, SIZE), 30)
    make_clip(tmp_path / "whole.mp4", 60, SIZE, first=100)
    make_meta(tmp_path, tmp_path / "t.csv")
    table = ClipTable.load(tmp_path / "t.csv")
    assert table.num_frames.tolist() == [60, 60]
    members = np.array([0, 1])
    (hit,) = _read(table, [Batch((0,), 60, 64, 96, (0,), members)])
    assert hit.rows == (1,)
    ((row, reason),) = hit.replaced
    assert row == 0
    assert "frame " in reason
    assert "of 60 cannot be decoded: the file is damaged there" in reason
    assert frame_numbers(hit.video[0].permute(1, 2, 3, 0).numpy()) == list(range(100, 160))
    # --exact counts what comes whole, and of that the loader gives every frame.
    make_meta(tmp_path, tmp_path / "exact.csv", exact=True)
    exact = ClipTable.load(tmp_path / "exact.csv")
    usable = int(exact.num_frames[0])
    assert 24 <= usable <= 30
    (kept,) = _read(exact, [Batch((0,), usable, 64, 96, (0,), members)])
    assert (kept.rows, kept.replaced) == ((0,), ())
    assert frame_numbers(kept.video[0].permute(1, 2, 3, 0).numpy()) == list(range(usable))
    assert probe(path, exact=True).num_frames == usable


def test_what_data_meta_refuses_the_loader_names_with_the_same_reason(tmp_path: Path) -> None:
    make_clip(tmp_path / "a good.mp4", 20, SIZE)
    (tmp_path / "b stub.mp4").write_bytes(b"\0" * 4000)
    cut_bytes(tmp_path / "a good.mp4", tmp_path / "c no header.mp4", 0.7)
    (tmp_path / "d empty.mp4").touch()
    result = make_meta(tmp_path, tmp_path / "t.csv")
    reasons = dict(result.bad)
    assert set(reasons) == {"b stub.mp4", "c no header.mp4", "d empty.mp4"}
    assert len(ClipTable.load(tmp_path / "t.csv")) == 1
    lines = (tmp_path / "t.csv").read_text().splitlines()
    # A table that was written before the files broke.
    forged = [lines[0], lines[1], *(lines[1].replace("a good.mp4", name) for name in reasons)]
    (tmp_path / "t.csv").write_text("\n".join(forged) + "\n")
    table = ClipTable.load(tmp_path / "t.csv")
    for row, (name, reason) in enumerate(reasons.items(), 1):
        (batch,) = _read(table, [Batch((row,), 9, 64, 96, (0,), np.array([0, row]))])
        assert batch.replaced == ((row, str(Failure(row, str(tmp_path / name), reason))),)
        with pytest.raises(MediaError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            read_frames(tmp_path / name, [0])
    with pytest.raises(DataError, match="no clip of the bucket"):
        _read(table, [Batch((1,), 9, 64, 96, (0,), np.array([1, 2, 3]))])


# -- machines without shared memory ------------------------------------------------------------------------------------


def test_data_meta_needs_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one process it makes no semaphore at all; with several, one that cannot be had costs the workers only."""
    for i in range(4):
        make_clip(tmp_path / f"{i}.mp4", 4, SIZE)
    alone = make_meta(tmp_path, tmp_path / "alone.csv", num_workers=0)

    def none_left(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", none_left)
    again = make_meta(tmp_path, tmp_path / "again.csv", num_workers=0)
    with caplog.at_level(logging.WARNING):
        many = make_meta(tmp_path, tmp_path / "many.csv", num_workers=3)
    assert alone.rows == again.rows == many.rows == 4
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "alone.csv").read_bytes()
    assert "No space left on device" in caplog.text
    assert "one after the other" in caplog.text
