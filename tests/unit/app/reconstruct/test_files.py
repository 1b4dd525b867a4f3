"""The output folder: what is replaced, what stays, and what happens when it cannot be written."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.recon import config, scores

from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import write_video
from osora_cli.errors import SetupError, UsageError


def test_a_second_run_replaces_its_own_files_and_no_others(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    out = tmp_path / "out"
    (out / "orig").mkdir(parents=True)
    foreign = [out / "orig" / "mine.mp4", out / "notes.txt", out / "orig" / "other"]
    for path in foreign:
        path.write_text("mine")
    first = reconstruct(config(clips[0], run, out))
    second = reconstruct(config(clips[0], run, out, use_ema=False))
    assert scores(first) != scores(second)
    assert all(path.read_text() == "mine" for path in foreign)
    names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p not in foreign)
    assert names == ["metrics.json", "orig/a_b_1.mp4", "recn/a_b_1.mp4", "side_by_side.png", "side_by_side/a_b_1.mp4"]
    assert json.loads((out / "metrics.json").read_text())["mean"]["psnr"] == second.mean["psnr"]


def test_an_output_folder_that_cannot_be_made(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="cannot write") as caught:
        reconstruct(config(clips[0], run, tmp_path / "file"))
    assert caught.value.exit_code == 5


def test_a_full_disk_is_said_and_leaves_no_half_video(tmp_path: Path, run: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "noise.mp4", noise, 24, lossless=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SetupError, match=r"cannot write to .*File too large"):
            reconstruct(config(tmp_path / "noise.mp4", run, tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_the_input_is_never_overwritten(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    (tmp_path / "orig").mkdir()
    clip = Path(shutil.copy(clips[0], tmp_path / "orig" / "clip.mp4"))
    before = clip.read_bytes()
    with pytest.raises(UsageError, match="in the folder that the reconstruction is written to"):
        reconstruct(config(tmp_path / "orig", run, tmp_path))
    assert clip.read_bytes() == before
