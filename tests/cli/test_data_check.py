"""`osora data check`, run as a user runs it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.clips import make_clip, real_clips
from support.tables import clip_row, raw_row, write_table

from osora_cli.cli.main import run

CONFIG = """\
model:
  type: dc_ae
  model_name: dc-ae-f32t4c128
bucket_config:
  256px:
    16: [1.0, 1]
    32: [1.0, 2]
dataset:
  fps_max: 24
seed: 7
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows of four kinds; no file is there."""
    rows = [raw_row(f"long {i}.mp4", "x", 100, 256, 256, 24.0) for i in range(5)]
    rows += [raw_row(f"short, {i}.mp4", "x", 40, 720, 1280, 30.0) for i in range(3)]
    rows += [raw_row("small.mp4", "x", 99, 100, 100, 24.0), raw_row("tiny.mp4", "x", 5, 512, 512, 24.0)]
    rows += [raw_row("still.png", "x", 1, 512, 512, math.nan)]
    (tmp_path / "check.yaml").write_text(CONFIG)
    return write_table(tmp_path / "clips.csv", rows)


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = run([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_buckets_batches_and_every_clip_left_out(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "check.yaml"
    code, out, err = said(capsys, "data", "check", table, config, "--ranks", "2", "--no-files")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == [
        "bucket", "frames", "size", "ratio", "clips", "batch", "batches", "unused", "Mpixel/batch", "share",
    ]  # fmt: skip
    assert [line.split() for line in lines[1:3]] == [
        ["256px", "32", "256x256", "1:1", "5", "2", "2", "1", "4.19", "72.1%"],
        ["256px", "16", "352x192", "16:9", "3", "1", "3", "0", "1.08", "27.9%"],
    ]
    assert "epoch 0: 8 of 11 clips in buckets, 5 batches, 2 for each of 2 ranks" in lines
    assert "left out: 1: fewer pixels than 0.8 of every resolution" in lines
    assert any(line.startswith("left out: row 8, small.mp4: 99 frames, 100x100; `256px` needs") for line in lines)
    assert any(line.startswith("left out: row 9, tiny.mp4: 5 frames") for line in lines)
    assert any(line.startswith("left out: row 10, still.png: 1 frame") for line in lines)


def test_the_same_in_json_and_clip_by_clip(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, lines = tmp_path / "check.yaml", tmp_path / "lines.csv"
    code, out, _ = said(capsys, "data", "check", table, config, "--json", "--no-files", "--clips-out", lines)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert (found["command"], found["seed"], found["clips"]) == ("train vae", 7, 11)
    assert (found["batches"], found["batches_per_rank"], found["rank_balance"]) == (5, 5, 1.0)
    assert sum(bucket["cost_share"] for bucket in found["buckets"]) == pytest.approx(1, abs=1e-5)
    assert sum(bucket["clips"] for bucket in found["buckets"]) + len(found["left_out"]) == 11
    assert [(clip["row"], clip["path"]) for clip in found["left_out"]] == [
        (8, "small.mp4"), (9, "tiny.mp4"), (10, "still.png"),
    ]  # fmt: skip
    assert found["left_out_by_reason"] == {clip["reason"]: 1 for clip in found["left_out"]}
    assert found["missing_files"] is None
    with lines.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == list(range(11))
    assert [rows[i]["path"] for i in (0, 5)] == ["long 0.mp4", "short, 0.mp4"]
    # 40 frames at 30 a second, at most 24 wanted: every second one is used.
    assert (rows[5]["num_frames"], rows[5]["used_frames"]) == ("40", "20")
    assert rows[5]["bucket"].startswith("256px 16 frames ")
    assert all(bool(row["bucket"]) != bool(row["reason"]) for row in rows)


def test_keys_of_the_config_may_follow(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "check", table, tmp_path / "check.yaml", "--no-files", "--json"]
    code, out, _ = said(capsys, *argv, "--dataset.fps-max", "16", "--bucket_config", '{"512px": {"1": [1.0, 1]}}')
    assert code == 0
    assert [(b["resolution"], b["clips"]) for b in json.loads(out)["buckets"]] == [("512px", 1)]
    code, _, err = said(capsys, *argv, "--fps-max", "16")
    assert code == 2
    assert "--dataset.fps-max" in err
    code, _, err = said(capsys, *argv, "--bucket_config", '{"256px": {"32": [33, 1]}}')
    assert code == 2
    assert "33" in err
    code, _, err = said(capsys, *argv, "--bucket_config", '{"256px": {"33": [1.0, 1]}}')
    assert code == 2
    assert "frames 32 or 36" in err


@pytest.mark.parametrize(
    ("preset", "command"),
    [
        ("vae/train/video_dc_ae", "train vae"),
        ("demo/vae", "train vae"),
        ("vae/train/video_dc_ae_disc", "train vae-disc"),
        ("diffusion/train/stage1", "train diffusion"),
    ],
)
def test_presets_of_every_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, command: str
) -> None:
    table = write_table(tmp_path / "real.csv", [clip_row(path) for path in real_clips()] * 6)
    code, out, err = said(capsys, "data", "check", table, preset)
    assert code == 0
    assert err.splitlines()[0] == f"config: the preset `{preset}`"
    # Its captions are to hold motion scores, and the table has none.
    assert ("`dataset.vmaf` is on" in err) == (preset == "diffusion/train/stage1")
    assert " of 24 clips in buckets" in out
    _, out, _ = said(capsys, "data", "check", table, preset, "--json", "--no-files")
    assert json.loads(out)["command"] == command


def test_no_batch_is_exit_3_with_the_table(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "check", table, tmp_path / "check.yaml", "--no-files", "--ranks", "9"]
    code, out, err = said(capsys, *argv)
    assert code == 3
    assert "5 batches, 0 for each of 9 ranks" in out
    assert "error: no bucket gives a batch" in err
    assert "fewer ranks" in err
    code, out, err = said(capsys, *argv, "--json")
    assert code == 3
    found = json.loads(out)
    assert found["batches_per_rank"] == 0
    assert found["error"]["message"].startswith("no bucket gives a batch")
    assert "error: no bucket gives a batch" in err


def test_files_that_are_missing(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "data", "check", table, tmp_path / "check.yaml")
    assert code == 3
    assert "8 of 11 clips in buckets" in out
    assert "error: 11 of 11 files of the table do not exist" in err
    for row in range(1, 5):
        (tmp_path / f"long {row}.mp4").touch()
    argv = ["data", "check", table, tmp_path / "check.yaml", "--dataset.max-bad-fraction", "0.9"]
    code, _, err = said(capsys, *argv)
    assert code == 0
    assert "7 of 11 files of the table do not exist: `long 0.mp4` (row 0), `short, 0.mp4` (row 5)" in err
    code, out, _ = said(capsys, *argv, "--json")
    assert json.loads(out)["missing_files"][:2] == ["long 0.mp4", "short, 0.mp4"]


def test_tables_and_options_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = make_clip(tmp_path / "clip.mp4", 4)
    for argv, code, words in (
        ([clip, "demo/vae"], 3, "is a clip, not a table"),
        ([tmp_path / "none.csv", "demo/vae"], 3, "does not exist"),
        ([tmp_path / "none.csv", "no/such"], 2, "`no/such` does not exist"),
        ([tmp_path / "none.csv", "demo/vae", "--ranks", "0"], 2, "ranks"),
        ([tmp_path / "none.csv", "demo/vae", "--clips-out", "x.txt"], 2, "no CSV by its name"),
        ([tmp_path / "t.csv", "demo/vae", "--clips-out", tmp_path / "t.csv"], 2, "would replace the table"),
        ([], 2, "TABLE"),
    ):
        got, _, err = said(capsys, "data", "check", *argv)
        assert got == code, argv
        assert words.lower() in err.lower(), argv
        assert "Traceback" not in err
