"""Clips that cannot be read, their names, and how they are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.clips import cut_bytes, make_clip
from support.recon import config, write_table

from osora_cli.app.reconstruct.clips import unique_names
from osora_cli.app.reconstruct.pieces import cut
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import probe, read_frames
from osora_cli.errors import DataError


@pytest.mark.parametrize(
    ("length", "chunk", "expected"),
    [
        (5, 8, [(0, 5, 0)]),
        (8, 8, [(0, 8, 0)]),
        (9, 8, [(0, 8, 0), (1, 9, 7)]),
        (20, 8, [(0, 8, 0), (8, 16, 0), (12, 20, 4)]),
        (3, 1, [(0, 1, 0), (1, 2, 0), (2, 3, 0)]),
    ],
)
def test_cut(length: int, chunk: int, expected: list[tuple[int, int, int]]) -> None:
    assert cut(length, chunk) == expected


def test_every_frame_of_any_length_comes_once() -> None:
    for length in range(1, 70):
        for chunk in (1, 2, 8, 13):
            frames = [i for start, stop, skip in cut(length, chunk) for i in range(start + skip, stop)]
            assert frames == list(range(length))


def test_clips_that_cannot_be_read_are_named_and_leave_nothing(tmp_path: Path, run: Path) -> None:
    whole = make_clip(tmp_path / "whole.mkv", frames=40)
    broken = cut_bytes(whole, tmp_path / "broken.mkv", 0.5)
    held = probe(broken).num_frames
    assert 4 < held < 32
    table = write_table(tmp_path / "t.csv", [whole, whole, broken])
    lines = table.read_text().splitlines()
    lines[2] = lines[2].replace("whole.mkv", "missing.mkv")
    lines[3] = lines[3].replace(f",{held},", ",40,")
    table.write_text("\n".join(lines) + "\n")
    # A file that is shorter than its row says is used as it is; a window that it cannot fill is not made up.
    result = reconstruct(config(table, run, tmp_path / "out"))
    assert [(clip.row, clip.frames) for clip in result.clips] == [(0, 40), (2, held)]
    assert [(c.row, "does not exist" in c.reason) for c in result.left_out] == [(1, True)]
    dataset = {"data_path": str(table), "fps_max": 30}
    window = {"32px_ar1:1": {32: [1.0, 1]}}
    result = reconstruct(config(table, run, tmp_path / "out2", bucket_config=window, dataset=dataset))
    assert [clip.row for clip in result.clips] == [0]
    assert [(c.row, f"it holds {held}" in c.reason) for c in result.left_out] == [(1, False), (2, True)]
    assert sorted(p.name for p in (tmp_path / "out2" / "recn").iterdir()) == ["whole.mp4"]


def test_a_clip_that_breaks_off_in_the_middle_leaves_no_files(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osora_cli.data.media import MediaError

    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        make_clip(data / f"{name}.mp4", frames=30, size=(64, 48))

    def failing(path: Path, indices: list[int]) -> np.ndarray:
        if Path(path).stem == "a" and indices[-1] > 20:
            raise MediaError(path, "frame 21 cannot be decoded")
        return read_frames(path, indices)

    monkeypatch.setattr("osora_cli.app.reconstruct.clips.read_frames", failing)
    monkeypatch.setattr("osora_cli.app.reconstruct.pieces._READ_BYTES", 1)
    result = reconstruct(config(data, run, tmp_path / "out"))
    assert [clip.name for clip in result.clips] == ["b"]
    assert result.left_out[0].reason == "frame 21 cannot be decoded"
    files = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert files == ["metrics.json", "orig/b.mp4", "recn/b.mp4", "side_by_side.png", "side_by_side/b.mp4"]


def test_no_usable_clip_ends_with_3_before_anything_is_made(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    with pytest.raises(DataError, match="none of 3 clips") as caught:
        reconstruct(config(table, run, tmp_path / "out", bucket_config={"512px": {8: [1.0, 1]}}))
    assert caught.value.exit_code == 3
    assert "in no bucket" in str(caught.value)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x.mp4").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for data in (bad, tmp_path / "empty", tmp_path / "absent.csv"):
        with pytest.raises(DataError):
            reconstruct(config(data, run, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_unique_names() -> None:
    assert unique_names(["a/x.mp4", "b/X.mov", "c/x_2.mp4", "../..", "-.mp4", "d/x.mp4"]) == [
        "x",
        "X_2",
        "x_2_2",
        "clip",
        "clip_2",
        "x_3",
    ]
    long = unique_names(["é" * 300 + ".mp4", "é" * 300 + ".mkv"])
    assert len(set(long)) == 2
    assert all(len(name.encode()) < 240 for name in long)
