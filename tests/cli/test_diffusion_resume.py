"""A diffusion run that was stopped, killed and resumed equals the run that never was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.process import Kill, osora
from support.same_run import assert_same_run, tensors
from support.tiny import make_table, records
from support.tiny_diffusion import CAUSAL, MODEL, add_stills, write_config

UPDATES = 8
ASYNC = ("--async-io", "--no-async-io", "--async-io")

# Epochs have two batches of clips and, where there are stills, two of those: 4 is the end of one.
CASES: dict[str, dict[str, Any]] = {
    "dc_ae": {},
    "hunyuan-i2v-bf16": {**CAUSAL, "dtype": "bf16"},
    "stills-accumulation-recomputed": {
        **CAUSAL,
        "model": {**MODEL, "cond_embed": True, "grad_ckpt_settings": [1, 1]},
        "bucket_config": {"64px_ar3:2": {1: [1.0, 2], 9: [1.0, 2]}},
        "accumulation_steps": 2,
        "grad_checkpoint": True,
        "no_i2v_ref_loss": True,
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    make_table(folder)
    add_stills(folder)
    return folder


def ok(*argv: str | Path, cwd: Path, kill: Kill | None = None, env: dict[str, str] | None = None) -> str:
    finished = osora(*argv, cwd=cwd, kill=kill, env=env)
    assert finished.code == (-9 if kill else 0), finished.stderr
    return finished.stderr


@pytest.fixture(scope="module")
def straight(home: Path) -> dict[str, Path]:
    runs = {}
    for name, changes in CASES.items():
        folder = home / f"straight-{name}"
        folder.mkdir()
        write_config(folder, max_steps=UPDATES, **changes)
        ok("train", "diffusion", folder / "tiny.yaml", "--exp-name", "run", "--outputs", folder, cwd=home)
        runs[name] = folder / "run"
    return runs


@pytest.mark.parametrize(("case", "io"), list(zip(CASES, ASYNC, strict=True)))
def test_stopped_killed_and_resumed(home: Path, tmp_path: Path, straight: dict[str, Path], case: str, io: str) -> None:
    config, run = write_config(tmp_path, **CASES[case]), tmp_path / "run"
    ok("train", "diffusion", config, "--exp-name", "run", "--outputs", tmp_path, io, "--max-steps", "3", cwd=home)
    ok("resume", run, "--max-steps", "8", cwd=home, kill=Kill(step=4))
    ok("resume", run, "--max-steps", "5", "--warmup-ae", cwd=home)  # which draws nothing
    ok("resume", run, "--max-steps", str(UPDATES), cwd=home)
    assert_same_run(straight[case], run, UPDATES)
    # The straight run saved in the foreground: where this one did not, the two ways of writing gave the same bytes.
    newest = run / (run / "latest").read_text().strip()
    assert (newest / ("ema.safetensors" if io == "--async-io" else "ema.pt")).is_file()
    assert (newest / "async_file_io.log").is_file() == (io == "--async-io")


def test_stopped_at_an_epochs_end_and_with_workers(home: Path, tmp_path: Path, straight: dict[str, Path]) -> None:
    config, run = write_config(tmp_path, num_workers=1), tmp_path / "run"
    ok("train", "diffusion", config, "--exp-name", "run", "--outputs", tmp_path, "--max-steps", "4", cwd=home)
    ok("resume", run, "--max-steps", str(UPDATES), "--num-workers", "0", cwd=home)
    assert_same_run(straight["dc_ae"], run, UPDATES)


def test_compiled_blocks(home: Path, tmp_path: Path) -> None:
    """What compiles ahead leaves no trace in the state that it compiles on, at the start and on a resume."""
    env = {"OSORA_COMPILE_BACKEND": "aot_eager"}  # traced like all, and quicker than kernels
    model = {**MODEL, "depth": 0, "depth_single_blocks": 2, "grad_ckpt_settings": [0, 1]}
    write_config(tmp_path, model=model, grad_checkpoint=True, max_steps=4, compile=True, ckpt_every=2)
    named = ("train", "diffusion", tmp_path / "tiny.yaml", "--outputs", tmp_path, "--exp-name")
    log = ok(*named, "straight", cwd=home, env=env)
    log += ok(*named, "again", "--load", tmp_path / "straight" / "epoch0-global_step2", cwd=home, env=env)
    assert log.count("compiled 1 shapes in") == log.count("(1 graphs)") == 2
    assert "not among the shapes" not in log
    assert records(tmp_path / "straight")[2:] == records(tmp_path / "again")
    left, right = tensors(tmp_path / "straight"), tensors(tmp_path / "again")
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []
