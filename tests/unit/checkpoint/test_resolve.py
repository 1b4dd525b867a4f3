"""What `--load` and a resume take."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import save
from support.opensora import write_async

from osora_cli.checkpoint.resolve import newest_verified, resolve_load
from osora_cli.errors import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_of_a_run(run: Path) -> None:
    for paths in (
        [str(run)],
        [str(run / "epoch*")],
        [str(p) for p in sorted(run.iterdir())],
        [str(run) + "*"],
        [str(run / "epoch0-global_step1"), str(run / "epoch0-global_step3")],
    ):
        resolved = resolve_load(paths)
        assert resolved.path.name == "epoch0-global_step3", paths
        assert resolved.passed_over == []


def test_a_named_one_is_taken_although_there_are_newer(run: Path) -> None:
    assert resolve_load([str(run / "epoch0-global_step1")]).path == run / "epoch0-global_step1"


def test_a_bad_one_is_passed_over_with_the_reason(run: Path) -> None:
    flip(run / "epoch0-global_step3/ema.safetensors")
    (run / "epoch0-global_step2/running_states.json").unlink()
    resolved = resolve_load([str(run)])
    assert resolved.path == run / "epoch0-global_step1"
    assert [(p.name, verdict) for p, verdict, _ in resolved.passed_over] == [
        ("epoch0-global_step3", "damaged"),
        ("epoch0-global_step2", "incomplete"),
    ]
    assert resolved.passed_over[0][2].startswith("ema.safetensors: bytes ")
    assert resolved.passed_over[1][2] == "running_states.json: is missing"
    assert newest_verified(run) == resolved


def test_a_newest_one_without_its_manifest_is_passed_over_not_forgotten(run: Path) -> None:
    (run / "epoch0-global_step3/manifest.json").unlink()
    resolved = resolve_load([str(run)])
    assert resolved.path.name == "epoch0-global_step2"
    assert [(p.name, verdict) for p, verdict, _ in resolved.passed_over] == [("epoch0-global_step3", "incomplete")]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda run: [str(run / "epoch9*")], "matches nothing"),
        (lambda run: [str(run / "none")], "does not exist"),
        (lambda run: [str(run.parent / "empty")], "has no `running_states.json`"),
        (lambda run: [str(run / "latest")], "is no folder"),
        (lambda run: [str(run.parent / "empt*"), str(run.parent / "empt*")], "holds no checkpoint"),
        (lambda run: [str(run / "epoch0-global_step1"), str(run / "none*")], "matches nothing"),
    ],
)
def test_what_leads_to_nothing_says_which(run: Path, make, what: str) -> None:
    (run.parent / "empty").mkdir()
    with pytest.raises(CheckpointError, match=what) as caught:
        resolve_load(make(run))
    assert caught.value.exit_code == 4


def test_none_that_verifies_lists_all(run: Path) -> None:
    for step in (1, 2, 3):
        flip(run / f"epoch0-global_step{step}/master.safetensors")
    with pytest.raises(CheckpointError) as caught:
        resolve_load([str(run)])
    text = str(caught.value)
    assert all(f"`epoch0-global_step{step}` is damaged: master.safetensors" in text for step in (1, 2, 3))
    assert f"osora ckpt verify {run}" in text
    with pytest.raises(CheckpointError):
        newest_verified(run)


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert newest_verified(tmp_path) is None
    assert newest_verified(tmp_path / "none") is None


def test_open_soras_own_and_ours_in_one_run(tmp_path: Path) -> None:
    """A run that went on from Open-Sora's checkpoint: its number stands where its update does."""
    write_async(tmp_path / "epoch0-global_step100", 100)
    assert resolve_load([str(tmp_path)]).path.name == "epoch0-global_step100"
    save(tmp_path, 101)
    assert resolve_load([str(tmp_path)]).path.name == "epoch0-global_step101"


def test_between_runs_the_update_decides(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, 2, 3)
    save(tmp_path / "b", 9)
    assert resolve_load([str(tmp_path / "*")]).path == tmp_path / "b/epoch0-global_step9"
