"""Whole trainings over ranks, by the command line: order of clips, resume elsewhere, errors, signals, lost ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.process import osora
from support.ranked import run_ranks, start_ranks, wait_until

from osora_cli.checkpoint.verify import verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    tiny.make_table(path, clips=13)
    tiny.write_config(path, ckpt_every=0, max_steps=3, log_every=1, eval={"at_ends": False})
    return path


def records(run: Path) -> list[dict[str, Any]]:
    return tiny.records(run)


def test_order_of_clips_goes_on_at_another_number_of_ranks(folder: Path) -> None:
    """Three updates by one process see what 2 ranks and then 1 see: no clip twice, none left out."""
    alone = osora("train", "vae", "tiny.yaml", "--exp-name", "alone", "--max-steps", "6", cwd=folder)
    assert alone.code == 0, alone.stderr
    results = run_ranks(2, "train", "vae", "tiny.yaml", "--exp-name", "moved", "--max-steps", "1", cwd=folder)
    assert [r.code for r in results] == [0, 0], results
    moved = folder / "outputs" / "moved"
    results = run_ranks(3, "resume", moved, "--max-steps", "2", "--plugin", "zero3", cwd=folder)
    assert [r.code for r in results] == [0, 0, 0], results
    last = osora("resume", moved, "--max-steps", "3", cwd=folder)
    assert last.code == 0, last.stderr
    seen = [row for record in records(moved) for row in record["samples"]]
    assert [len(record["samples"]) for record in records(moved)] == [4, 6, 2]
    assert seen == [row for record in records(folder / "outputs" / "alone") for row in record["samples"]]
    assert verify(moved / "epoch0-global_step3").verdict == "ok"
    assert len(set(seen)) == 12  # an epoch of 13 clips, two at a time


def test_rank_0_speaks_and_the_others_write_to_files(folder: Path) -> None:
    lead, other = run_ranks(2, "train", "vae", "tiny.yaml", "--exp-name", "voice", "--json", cwd=folder)
    assert (lead.code, other.code) == (0, 0), lead.stderr
    assert lead.json()["steps"] == 3
    assert (other.stdout, other.stderr) == ("", "")
    log = (folder / "outputs/voice/ranks/rank1.log").read_text()
    assert "update 3/3" in log
    losses = [record["loss"] for record in records(folder / "outputs/voice")]
    assert f"loss {losses[0]:.5g}" in log  # the mean over ranks, not the rank's own


def test_few_clips_do_not_hang(folder: Path, tmp_path: Path) -> None:
    tiny.make_table(tmp_path, clips=5)
    tiny.write_config(tmp_path, ckpt_every=0, epochs=2)
    results = run_ranks(2, "train", "vae", "tiny.yaml", "--exp-name", "few", cwd=tmp_path)
    assert [r.code for r in results] == [0, 0], results
    assert len(records(tmp_path / "outputs/few")) == 2  # two batches of two an epoch, one a rank
    refused = run_ranks(3, "train", "vae", "tiny.yaml", "--exp-name", "fewer", cwd=tmp_path)
    assert [r.code for r in refused] == [3, 3, 3]
    assert "has 2 batches, too few for `3` ranks" in refused[0].stderr
    assert [r.stderr for r in refused[1:]] == ["", ""]


def test_what_rank_0_refuses_all_leave_with(folder: Path) -> None:
    (folder / "outputs/taken").mkdir(parents=True)
    (folder / "outputs/taken/note.txt").write_text("x")
    began = time.monotonic()
    lead, other = run_ranks(2, "train", "vae", "tiny.yaml", "--exp-name", "taken", cwd=folder)
    assert (lead.code, other.code) == (2, 2)
    assert "exists already" in lead.stderr
    assert other.stderr == ""
    assert time.monotonic() - began < 60


@pytest.fixture
def endless(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, list[Any]]:
    """A run of two ranks that has begun to train and would go on for long."""
    name = request.node.name.replace("[", "-").rstrip("]")
    ranks = start_ranks(2, "train", "vae", "tiny.yaml", "--exp-name", name, "--max-steps", "100000", cwd=folder)
    run = folder / "outputs" / name
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
    return run, ranks


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_with_a_message(endless: tuple[Path, list[Any]], killed: int) -> None:
    _, ranks = endless
    os.kill(ranks[killed].process.pid, signal.SIGKILL)
    began = time.monotonic()
    left = ranks[1 - killed].finish()
    assert time.monotonic() - began < 60
    assert left.code == 1
    assert f"rank {1 - killed} of 2 lost another rank in update" in left.stderr
    assert "Traceback" not in left.stderr


def test_a_signal_to_one_rank_stops_all_after_a_save(endless: tuple[Path, list[Any]]) -> None:
    run, ranks = endless
    os.kill(ranks[1].process.pid, signal.SIGTERM)
    lead, other = (rank.finish() for rank in ranks)
    assert (lead.code, other.code) == (143, 143)
    assert "SIGTERM: stopped after update" in lead.stderr
    assert other.stderr == ""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert verify(run / (run / "latest").read_text().strip()).verdict == "ok"
    assert (run / "latest").read_text().strip().endswith(f"global_step{last}")


def test_an_error_of_one_rank_is_said_by_it_and_ends_all(folder: Path) -> None:
    """A clip that only rank 1 reads is damaged while the run goes on, and the run may lose none."""
    data = folder / "spoilt"
    data.mkdir()
    tiny.make_table(data, clips=4)
    tiny.write_config(data, ckpt_every=0, max_steps=100000)
    ranks = start_ranks(
        2, "train", "vae", "tiny.yaml", "--exp-name", "s", "--dataset.max-bad-fraction", "0", cwd=data
    )  # fmt: skip
    run = data / "outputs" / "s"
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 1)
    for clip in data.glob("clip*.mp4"):
        clip.write_bytes(b"nothing")
    began = time.monotonic()
    results = [rank.finish() for rank in ranks]
    assert time.monotonic() - began < 60
    assert {r.code for r in results} == {3}
    assert sum("error:" in r.stderr for r in results) == 1, [r.stderr[-500:] for r in results]
