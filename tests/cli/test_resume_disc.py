"""The second stage, stopped, killed and resumed, equals the run that never was: both networks, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.disc import write_disc_config
from support.process import Kill, osora
from support.tiny import make_table, records, write_config

UPDATES = 7
EARLY: dict[str, Any] = {
    "disc_loss_config": {"disc_start": 2},
    "gen_loss_config": {"gen_start": 3, "gen_ramp": 3},  # half way up the ramp at the stop
}
LATE: dict[str, Any] = {"disc_loss_config": {"disc_start": 5}, "gen_loss_config": {"gen_start": 6}}
CASES: dict[str, dict[str, Any]] = {
    "started-before-bf16": {**EARLY, "dtype": "bf16"},
    "starting-after-fp32": LATE,
    "starting-after-bf16-accumulation": {**LATE, "accumulation_steps": 2, "dtype": "bf16"},
    "started-before-fp32-frozen-encoder": {**EARLY, "freeze_layers": "encoder"},
}
PARTS = {"model", "optimizer", "discriminator", "disc_optimizer", "ema.safetensors"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disc")
    make_table(folder)
    config = write_config(folder, max_steps=2)
    ok("train", "vae", config, "--exp-name", "stage1", "--outputs", folder, cwd=folder)
    return folder


def ok(*argv: str | Path, cwd: Path, kill: Kill | None = None) -> str:
    finished = osora(*argv, cwd=cwd, kill=kill)
    assert finished.code == (-9 if kill else 0), finished.stderr
    return finished.stderr


def begin(home: Path, folder: Path, *argv: str | Path, **changes: Any) -> Path:
    config = write_disc_config(folder, **changes)
    first = ("--from-pretrained", home / "stage1", "--exp-name", "run", "--outputs", folder)
    ok("train", "vae-disc", config, *first, *argv, cwd=home)
    return folder / "run"


def newest(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of the asynchronous mode, by file and key."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{path.relative_to(checkpoint)}/{k}": t for k, t in load_file(path).items()}
    return found


def assert_same_run(straight: Path, broken: Path, *, masters: bool) -> None:
    a, b = records(straight), records(broken)
    assert [r["step"] for r in b] == list(range(1, UPDATES + 1))
    assert a == b
    left, right = tensors(newest(straight)), tensors(newest(broken))
    assert left.keys() == right.keys()
    masters_of = {"master.safetensors", "disc_master.safetensors"} if masters else set()
    assert {k.split("/")[0] for k in left} == PARTS | masters_of
    assert [k for k in left if not torch.equal(left[k], right[k])] == []
    for name in ("lr_scheduler", "disc_lr_scheduler", "sampler"):
        ours, theirs = (torch.load(newest(run) / name, weights_only=True) for run in (straight, broken))
        assert ours == theirs


@pytest.fixture(scope="module")
def straight(home: Path) -> dict[str, Path]:
    runs = {}
    for name, changes in CASES.items():
        folder = home / f"straight-{name}"
        folder.mkdir()
        runs[name] = begin(home, folder, "--async-io", max_steps=UPDATES, **changes)
    return runs


@pytest.mark.parametrize("case", CASES)
def test_stopped_killed_and_resumed(home: Path, tmp_path: Path, straight: dict[str, Path], case: str) -> None:
    run = begin(home, tmp_path, "--async-io", "--max-steps", "3", **CASES[case])
    ok("resume", run, "--max-steps", "7", cwd=home, kill=Kill(step=4))
    ok("resume", run, "--max-steps", "5", cwd=home)
    ok("resume", run, "--max-steps", str(UPDATES), cwd=home)
    assert_same_run(straight[case], run, masters=CASES[case].get("dtype") == "bf16")


@pytest.mark.parametrize("phase", ["write", "manifest", "latest"])
def test_killed_in_a_save(home: Path, tmp_path: Path, straight: dict[str, Path], phase: str) -> None:
    case = "started-before-bf16"
    run = begin(home, tmp_path, "--async-io", "--max-steps", "3", **CASES[case])
    ok("resume", run, "--max-steps", "5", cwd=home, kill=Kill(phase))
    said = ok("resume", run, "--max-steps", str(UPDATES), cwd=home)
    assert f"update {5 if phase == 'latest' else 3}" in said
    assert_same_run(straight[case], run, masters=True)
    assert osora("ckpt", "verify", run, cwd=home).code == 0


def test_the_discriminator_is_trained_from_its_start_on_and_not_before(home: Path, tmp_path: Path) -> None:
    run = begin(home, tmp_path, "--async-io", max_steps=5, ckpt_every=1, disc_loss_config={"disc_start": 4})
    at = {n: tensors(next(run.glob(f"epoch*-global_step{n}"))) for n in range(1, 6)}

    def moved(before: int, after: int, part: str) -> list[str]:
        names = [k for k in at[before] if k.startswith(part) and not k.endswith(("running_mean", "running_var"))]
        return [k for k in names if "num_batches" not in k and not torch.equal(at[before][k], at[after][k])]

    for n in (2, 3):
        assert moved(n - 1, n, "discriminator/") == moved(n - 1, n, "disc_optimizer/") == []
        assert moved(n - 1, n, "model/")
    for n in (4, 5):
        weights = [k for k in at[n] if k.startswith("discriminator/") and k.endswith("weight")]
        assert set(weights) <= set(moved(n - 1, n, "discriminator/"))
    steps = {k: float(t) for k, t in at[5].items() if k.startswith("disc_optimizer/") and k.endswith(".step")}
    assert set(steps.values()) == {2.0}
    logged = records(run)
    assert ["disc_loss" in r for r in logged] == [False, False, False, True, True]
    assert all(r["d_weight"] > 0 and r["gen_factor"] == 1 for r in logged)
    deep = osora("ckpt", "verify", run, "--deep", cwd=home)
    assert deep.code == 0, deep.stdout


def test_the_term_of_the_autoencoder_begins_at_its_start_and_grows(home: Path, tmp_path: Path) -> None:
    run = begin(home, tmp_path, max_steps=6, gen_loss_config={"gen_start": 3, "gen_ramp": 2, "disc_factor": 3.0})
    logged = records(run)
    assert [r["gen_factor"] for r in logged] == [0, 0, 1, 2, 3, 3]
    for r in logged:
        assert r["loss"] == pytest.approx(r["nll"] + r["d_weight"] * r["gen_factor"] * r["gen_loss"], rel=1e-5)
    assert all("disc_loss" in r for r in logged)


def test_restart_disc_leaves_the_checkpoints_discriminator_out(home: Path, tmp_path: Path) -> None:
    run = begin(home, tmp_path, "--async-io", max_steps=3)
    config = tmp_path / "tiny.yaml"
    again = ("train", "vae-disc", config, "--load", run, "--outputs", tmp_path, "--async-io", "--max-steps", "4")
    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    assert "restart_disc:" not in ok(*again, "--exp-name", "kept", cwd=home)
    assert "restart_disc:" in ok(*again, "--exp-name", "fresh", "--restart-disc", cwd=home)
    a, b = tensors(newest(kept)), tensors(newest(fresh))
    assert float(a["disc_optimizer/optimizer-00001.safetensors/state.0.step"]) == 4
    assert float(b["disc_optimizer/optimizer-00001.safetensors/state.0.step"]) == 1
    assert float(b["optimizer/optimizer-00001.safetensors/state.0.step"]) == 4
    assert [r["step"] for r in records(fresh)] == [4]
    # The flag belongs to that call: going on keeps what has been trained since.
    ok("resume", fresh, "--max-steps", "5", cwd=home)
    assert float(tensors(newest(fresh))["disc_optimizer/optimizer-00001.safetensors/state.0.step"]) == 2
