"""A run that was stopped, killed and resumed equals the run that never was: bit for bit, record for record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.process import Kill, osora
from support.same_run import assert_same_run
from support.tiny import make_table, records, write_config

UPDATES = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    make_table(folder)
    return folder


def ok(*argv: str | Path, cwd: Path, kill: Kill | None = None) -> None:
    finished = osora(*argv, cwd=cwd, kill=kill)
    assert finished.code == (-9 if kill else 0), finished.stderr


# Epochs have two batches here (five clips, batch 2), so 3 and 5 lie in the middle of epochs and 4 at the end of one.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "accumulation": {"accumulation_steps": 2},  # an update over an epoch's end at batch 3
    "accumulation-bf16-over-the-end": {"accumulation_steps": 3, "dtype": "bf16"},
}


@pytest.fixture(scope="module")
def straight(home: Path) -> dict[str, Path]:
    runs = {}
    for name, changes in CASES.items():
        folder = home / f"straight-{name}"
        folder.mkdir()
        write_config(folder, max_steps=UPDATES, **changes)
        ok("train", "vae", folder / "tiny.yaml", "--exp-name", "run", "--outputs", folder, cwd=home)
        runs[name] = folder / "run"
    return runs


@pytest.mark.parametrize("io", ["--async-io", "--no-async-io"])
@pytest.mark.parametrize("case", CASES)
def test_stopped_killed_and_resumed(home: Path, tmp_path: Path, straight: dict[str, Path], case: str, io: str) -> None:
    config, run = write_config(tmp_path, **CASES[case]), tmp_path / "run"
    ok("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, io, "--max-steps", "3", cwd=home)
    ok("resume", run, "--max-steps", "7", cwd=home, kill=Kill(step=4))
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4]
    ok("resume", run, "--max-steps", "5", cwd=home)
    ok("resume", run, "--max-steps", str(UPDATES), cwd=home)
    assert_same_run(straight[case], run, UPDATES)
    mode = "ema.safetensors" if io == "--async-io" else "ema.pt"
    assert (run / (run / "latest").read_text().strip() / mode).is_file()


def test_stopped_at_an_epochs_end_with_workers(home: Path, tmp_path: Path, straight: dict[str, Path]) -> None:
    config, run = write_config(tmp_path, num_workers=2), tmp_path / "run"
    ok("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--async-io", "--max-steps", "4", cwd=home)
    ok("resume", run, "--max-steps", "6", "--num-workers", "0", cwd=home)
    ok("resume", run, "--max-steps", str(UPDATES), "--num-workers", "1", cwd=home)
    assert_same_run(straight["fp32"], run, UPDATES)


@pytest.mark.parametrize(
    ("kill", "takes"),
    [
        (Kill("write", nth=1), 4),  # .staging-* of the save at 6 exists, and is not whole
        (Kill("manifest"), 4),
        (Kill("commit-rename"), 4),
        (Kill("fsync-run"), 6),  # renamed, and `latest` still names the one before
        (Kill("latest"), 6),
        (Kill("retention"), 6),
    ],
    ids=lambda v: v.phase if isinstance(v, Kill) else "",
)
def test_killed_in_a_save(home: Path, tmp_path: Path, straight: dict[str, Path], kill: Kill, takes: int) -> None:
    config, run = write_config(tmp_path, max_steps=UPDATES), tmp_path / "run"
    ok("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--max-steps", "4", cwd=home)
    ok("resume", run, "--max-steps", "6", "--async-io", cwd=home, kill=kill)
    verdict = osora("ckpt", "verify", run, "--json", cwd=home).json()
    assert Path(verdict["resume_from"]).name.endswith(f"global_step{takes}")
    finished = osora("resume", run, "--max-steps", str(UPDATES), "--async-io", cwd=home)
    assert finished.code == 0
    assert f"update {takes}" in finished.stderr
    assert not list(run.glob(".staging-*"))
    assert_same_run(straight["fp32"], run, UPDATES)


def test_an_older_checkpoint_can_be_gone_on_from(home: Path, tmp_path: Path, straight: dict[str, Path]) -> None:
    config, run = write_config(tmp_path, ckpt_every=2), tmp_path / "run"
    ok("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--max-steps", "6", cwd=home)
    shutil.copytree(run, tmp_path / "before")
    ok("resume", next(run.glob("epoch*-global_step2")), "--max-steps", str(UPDATES), cwd=home)
    assert_same_run(straight["fp32"], run, UPDATES)
    aside = next(run.glob("set-aside-*"))
    assert sorted(p.name.split("step")[1] for p in aside.glob("epoch*")) == ["4", "6"]
    # The records of the updates that were set aside are kept with them.
    assert (aside / "metrics.jsonl").read_bytes() == (tmp_path / "before/metrics.jsonl").read_bytes()
    # A copy of the run resumes too: nothing in it hangs on where it lies.
    ok("resume", tmp_path / "before", "--max-steps", str(UPDATES), cwd=home)
    assert_same_run(straight["fp32"], tmp_path / "before", UPDATES)


def test_skipped_updates_are_counted_over_a_resume(home: Path, tmp_path: Path) -> None:
    """An absurd learning rate: everything is skipped from the second update on."""
    changes: dict[str, Any] = {"lr": 1e30, "grad_clip": 0.0, "lr_scheduler": {"warmup_steps": 0}}
    config, run = write_config(tmp_path, **changes), tmp_path / "run"
    ok("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--max-steps", "5", cwd=home)
    before = records(run)[-1]["skipped_updates"]
    assert before >= 3
    ok("resume", run, "--max-steps", "6", cwd=home)
    assert records(run)[-1]["skipped_updates"] == before + 1


def test_micro_batches_after_the_last_update_are_taken_again(home: Path, tmp_path: Path) -> None:
    """Five batches an epoch, two to an update: the epoch ends with one that no update has seen."""
    changes: dict[str, Any] = {"bucket_config": {"32px_ar1:1": {8: [1.0, 1]}}, "accumulation_steps": 2}
    config = write_config(tmp_path, **changes)
    ok("train", "vae", config, "--exp-name", "whole", "--outputs", tmp_path, "--epochs", "3", cwd=home)
    ok("train", "vae", config, "--exp-name", "parts", "--outputs", tmp_path, "--epochs", "1", cwd=home)
    ok("resume", tmp_path / "parts", "--epochs", "2", cwd=home)
    ok("resume", tmp_path / "parts", "--epochs", "3", cwd=home)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert len(records(tmp_path / "whole")) == 7
