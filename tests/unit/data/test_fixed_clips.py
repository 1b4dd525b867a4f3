"""The clips that a training is scored on: drawn once, the right frames, the right size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.clips import decode_all, frame_numbers, make_clip, real_clip
from support.tables import clip_row, make_table

from osora_cli.data.fixed_clips import FixedClip, plan_fixed_clips, read_fixed_clips
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import resize_crop_uint8
from osora_cli.errors import ConfigError, DataError

SETTINGS: dict[str, Any] = {
    "resolution": "64px", "frames": 8, "number": 4, "rows": None, "seed": 42, "spatial_compression": 8, "fps_max": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ClipTable:
    folder = tmp_path_factory.mktemp("fixed")
    sizes = [(96, 64), (64, 96), (96, 64), (96, 64)]
    clips = [make_clip(folder / f"c{i}.mp4", frames=30 + i, size=size) for i, size in enumerate(sizes)]
    short = make_clip(folder / "short.mp4", frames=6)
    return make_table(folder, [clip_row(path) for path in [*clips, short]])


def plan(table: ClipTable, **changes: Any) -> list[FixedClip]:
    return plan_fixed_clips(table, **{**SETTINGS, **changes})


def test_the_same_clips_every_time_and_of_one_size_in_a_row(table: ClipTable) -> None:
    clips = plan(table)
    assert clips == plan(table)
    assert sorted(clip.row for clip in clips) == [0, 1, 2, 3], "the short one does not fit"
    sizes = [clip.size for clip in clips]
    assert len(set(sizes)) == 2
    assert sizes == sorted(sizes)
    assert [c.indices for c in plan(table, seed=43)] != [c.indices for c in clips]
    assert {c.row for c in plan(table, number=2)} < {0, 1, 2, 3}


def test_the_frames_are_those_of_the_window_in_their_order(table: ClipTable) -> None:
    """Read at the clip's own size, so that the numbers drawn into the frames can be read."""
    clip = plan(table, rows=[2], number=1)[0]
    whole = FixedClip(clip.row, clip.path, clip.file, clip.indices, (64, 96))
    video = whole.read()
    assert video.dtype == torch.uint8
    assert frame_numbers(video.permute(1, 2, 3, 0).numpy()) == list(clip.indices)
    assert list(clip.indices) == list(range(clip.indices[0], clip.indices[0] + 8))


def test_a_real_clip_resized_as_in_training(tmp_path: Path) -> None:
    path = real_clip("carphone_pristine")
    (clip,) = plan(make_table(tmp_path, [clip_row(path)]), resolution="64px_ar1:1", fps_max=60, number=1)
    frames = torch.from_numpy(decode_all(path)[list(clip.indices)]).permute(0, 3, 1, 2)
    assert torch.equal(clip.read(), resize_crop_uint8(frames, (64, 64)).permute(1, 0, 2, 3))


def test_few_rows_give_several_windows(table: ClipTable) -> None:
    clips = plan(table, rows=[0], number=5)
    assert len({clip.indices for clip in clips}) == 5
    assert {clip.row for clip in clips} == {0}
    assert plan(table, rows=[0], number=2) == clips[:2], "more clips leave those there are as they are"
    exact = plan(table, rows=[0], number=5, frames=30, fps_max=24)
    assert len(exact) <= 2, "there are no more windows of 30 frames in 30"


def test_given_rows_that_do_not_fit_are_named(table: ClipTable) -> None:
    with pytest.raises(DataError, match=r"`.*short.mp4` \(row 4\): 6 frames.*needs 8 frames, it has 6"):
        plan(table, rows=[0, 4])
    with pytest.raises(ConfigError, match=r"`eval.rows` is `\[0, 9\]`"):
        plan(table, rows=[0, 9])
    with pytest.raises(DataError, match="no clip of the table is long and large enough"):
        plan(table, frames=40)


def test_all_clips_that_cannot_be_read_are_named(table: ClipTable, tmp_path: Path) -> None:
    good = plan(table, number=2)
    (tmp_path / "x.mp4").write_bytes(b"no film")
    bad = [FixedClip(row, f"x{row}.mp4", tmp_path / "x.mp4", (0, 1), (64, 64)) for row in (7, 8)]
    assert len(read_fixed_clips(good)) == 2
    with pytest.raises(DataError, match=r"2 of the 4 clips .*`x7.mp4` \(row 7\).*`x8.mp4` \(row 8\)"):
        read_fixed_clips([*good, *bad])
