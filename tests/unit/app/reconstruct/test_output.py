"""The videos and stills that a reconstruction writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.clips import frame_numbers, make_clip, pictures
from support.recon import config

from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import probe, read_frames, write_video


def test_side_by_side_is_the_original_left_and_the_reconstruction_right(tmp_path: Path, run: Path) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=12, size=(70, 50), fps=25)
    (score,) = reconstruct(config(clip, run, tmp_path / "out", lossless=True)).clips
    assert score.side_by_side == "side_by_side/c.mp4"
    orig, recn, pair = (
        read_frames(tmp_path / "out" / name, range(12)) for name in (score.orig, score.recn, score.side_by_side)
    )
    assert np.array_equal(pair, np.concatenate([orig, recn], axis=2))
    assert probe(tmp_path / "out" / score.side_by_side).fps == 25
    # Without loss: the frames are those of the file, to the last bit.
    assert np.array_equal(orig, read_frames(clip, range(12)))
    assert np.abs(orig.astype(int) - recn.astype(int)).mean() > 1


def test_without_side_by_side_and_lossy(tmp_path: Path, run: Path) -> None:
    frames = pictures(10, (64, 48))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    result = reconstruct(config(tmp_path / "c.mp4", run, tmp_path / "out", side_by_side=False))
    assert result.clips[0].side_by_side is None
    assert not (tmp_path / "out" / "side_by_side").exists()
    assert result.protocol["videos"].startswith("H.264")
    kept = read_frames(tmp_path / "out" / "orig/c.mp4", range(10))
    assert frame_numbers(kept) == [*range(10)]
    assert 0 < np.abs(kept.astype(int) - frames.astype(int)).mean() < 4


def test_a_still_beside_its_reconstruction(tmp_path: Path, run: Path) -> None:
    image = pictures(1, (70, 50))[0]
    Image.fromarray(image).save(tmp_path / "s.png")
    (score,) = reconstruct(config(tmp_path / "s.png", run, tmp_path / "out")).clips
    assert score.side_by_side == "side_by_side/s.png"
    with Image.open(tmp_path / "out" / score.side_by_side) as opened:
        assert opened.size == (140, 50)
        assert np.array_equal(np.asarray(opened)[:, :70], image)


def test_a_turned_clip_stays_upright(tmp_path: Path, run: Path) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=4, size=(66, 98), fps=30, rotate=90)
    (score,) = reconstruct(config(clip, run, tmp_path / "out")).clips
    assert (score.width, score.height) == (66, 98)
    assert score.side_by_side is not None
    info = probe(tmp_path / "out" / score.side_by_side)
    assert (info.width, info.height, info.num_frames) == (132, 98, 4)
    written = read_frames(tmp_path / "out" / score.orig, range(4))
    assert np.abs(written.astype(int) - read_frames(clip, range(4)).astype(int)).mean() < 4


def test_files_of_an_earlier_larger_run_go_and_no_others(tmp_path: Path, run: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in ("a", "b"):
        make_clip(data / f"{name}.mp4", frames=4, size=(64, 48))
    Image.fromarray(pictures(1, (64, 48))[0]).save(data / "s.png")
    reconstruct(config(data, run, out))
    foreign = [out / "orig" / "mine.mp4", out / "keep.txt", tmp_path / "outside.mp4", out / "orig" / "c.mp4"]
    for path in foreign:
        path.write_text("mine")
    # A listing that leads elsewhere, or names what is no file of ours, is not followed.
    listing = json.loads((out / "metrics.json").read_text())
    odd = ["../outside.mp4", str(tmp_path / "outside.mp4"), "keep.txt", "orig/../../outside.mp4", "orig", "orig/.."]
    listing["clips"] += [{"orig": name, "recn": None} for name in odd]
    (out / "metrics.json").write_text(json.dumps(listing))
    second = reconstruct(config(data / "b.mp4", run, out, side_by_side=False))
    assert all(path.read_text() == "mine" for path in foreign)
    left = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p not in foreign)
    assert left == ["metrics.json", "orig/b.mp4", "recn/b.mp4", "side_by_side.png"]
    (note,) = second.notes
    assert note.startswith(f"removed 7 files of an earlier run in `{out}`: orig/a.mp4, orig/s.png")
    assert note.endswith("and 2 more")
    # Again: nothing is left over, nothing is said.
    assert reconstruct(config(data / "b.mp4", run, out, side_by_side=False)).notes == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"clips": 3, "protocol": {}}', b'{"clips": [{"orig": "orig/mine.mp4"}]}']
)
def test_a_metrics_json_of_other_makers_is_not_taken_for_ours(tmp_path: Path, run: Path, content: bytes) -> None:
    out = tmp_path / "out"
    (out / "orig").mkdir(parents=True)
    (out / "orig" / "mine.mp4").write_text("mine")
    (out / "metrics.json").write_bytes(content)
    Image.fromarray(pictures(1, (64, 48))[0]).save(tmp_path / "s.png")
    assert reconstruct(config(tmp_path / "s.png", run, out)).notes == []
    assert (out / "orig" / "mine.mp4").read_text() == "mine"
