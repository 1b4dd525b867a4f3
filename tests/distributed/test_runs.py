"""Whole trainings over ranks, by the command line: order of clips, resume elsewhere, errors, signals, lost ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import tiny, tiny_diffusion
from support.disc import write_disc_config
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
    # Which is seen first: the collective that breaks off, or the store that rank 0 kept.
    who = f"rank {1 - killed} of 2"
    lost, alone = rf"{who} lost another rank in update \d", rf"{who}, in update \d+: the rank that keeps the store"
    assert re.search(lost if killed else f"{lost}|{alone}", left.stderr)
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


def test_two_ranks_learn_what_one_learns_from_the_same_clips(folder: Path) -> None:
    """One process that adds two batches up against two ranks that take one each: stage 1, by the command line."""
    alone = osora(
        "train", "vae", "tiny.yaml", "--exp-name", "sum", "--accumulation-steps", "2", "--max-steps", "5",
        "--epochs", "9", cwd=folder,
    )  # fmt: skip
    assert alone.code == 0, alone.stderr
    shared = run_ranks(
        2, "train", "vae", "tiny.yaml", "--exp-name", "mean", "--plugin", "zero2", "--max-steps", "5", cwd=folder
    )
    assert [r.code for r in shared] == [0, 0], shared
    one, two = records(folder / "outputs/sum"), records(folder / "outputs/mean")
    assert [r["samples"] for r in two] == [r["samples"] for r in one]
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-4)


@pytest.mark.parametrize("plugin", ["ddp", pytest.param("zero1", marks=pytest.mark.sweep), "zero3"])
def test_the_second_stage_over_ranks(tmp_path: Path, plugin: str) -> None:
    """Both networks, stills mixed in, bf16; one rank goes on with what two have saved."""
    tiny.make_table(tmp_path, clips=9)
    write_disc_config(
        tmp_path,
        ckpt_every=0,
        dtype="bf16",
        mixed_image_ratio=0.5,
        gen_loss_config={"gen_start": 2},
        eval={"at_ends": False},
    )
    first = run_ranks(
        2, "train", "vae-disc", "tiny.yaml", "--exp-name", "gan", "--plugin", plugin, "--max-steps", "3", cwd=tmp_path
    )
    assert [r.code for r in first] == [0, 0], [r.stderr[-1500:] for r in first]
    run = tmp_path / "outputs/gan"
    assert verify(run / "epoch1-global_step3").verdict == "ok"
    alone = osora("resume", run, "--max-steps", "4", cwd=tmp_path)
    assert alone.code == 0, alone.stderr
    assert [len(record["samples"]) for record in records(run)] == [4, 4, 4, 2]
    assert all("disc_loss" in record for record in records(run))


def test_shared_tokens_by_the_command_line(tmp_path: Path) -> None:
    """`plugin: hybrid` with sp_size 2: two ranks train on one sample's tokens as one process does on all."""
    tiny.make_table(tmp_path, clips=5)
    tiny_diffusion.write_config(tmp_path, max_steps=3, eval={"at_ends": False})
    alone = osora("train", "diffusion", "tiny.yaml", "--exp-name", "one", cwd=tmp_path)
    assert alone.code == 0, alone.stderr
    hybrid = ["--plugin", "hybrid", "--plugin-config.sp-size", "2", "--plugin-config.zero-stage", "1"]
    shared = run_ranks(2, "train", "diffusion", "tiny.yaml", "--exp-name", "two", *hybrid, cwd=tmp_path)
    assert [r.code for r in shared] == [0, 0], [r.stderr[-1500:] for r in shared]
    one, two = records(tmp_path / "outputs/one"), records(tmp_path / "outputs/two")
    assert [r["samples"] for r in two] == [r["samples"] for r in one]
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-4)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-4)


def test_processes_started_by_nproc(folder: Path) -> None:
    """SIGUSR1 to the launching process saves; a rank that is killed is named, and ends the others."""
    argv = ["train", "vae", "tiny.yaml", "--nproc", "2", "--exp-name", "nproc", "--max-steps", "100000"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-m", "osora_cli", *argv], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        run = folder / "outputs/nproc"
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 1, timeout=180)
        parent.send_signal(signal.SIGUSR1)
        wait_until(lambda: (run / "latest").exists())
        assert verify(run / (run / "latest").read_text().strip()).verdict == "ok"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        second = next(pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(second), signal.SIGKILL)
        _, err = parent.communicate(timeout=60)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == 1
    assert "error: rank 1 was ended by SIGKILL" in err or "lost another rank" in err
    assert "Traceback" not in err
