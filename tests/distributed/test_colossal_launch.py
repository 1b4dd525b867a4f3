"""ColossalAI on the CPU, where it is installed (docs/engines.md): its DDP over two processes, and its launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import make_table, write_config

from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.verify import verify

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        importlib.util.find_spec("colossalai") is None, reason="colossalai is not installed: docs/engines.md"
    ),
]
BIN = Path(sys.executable).parent
TRAIN = ("train", "vae", "tiny.yaml", "--max-steps", "2")
DDP = ("--engine", "colossalai", "--plugin", "ddp")


def call(*argv: str, cwd: Path) -> str:
    """A command of this environment, in processes of its own."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_its_launcher_and_its_ddp_over_two_processes(tmp_path: Path) -> None:
    make_table(tmp_path)
    write_config(tmp_path)
    launched = call(
        "colossalai", "run", "--nproc_per_node", "2", "-m", "osora_cli", *TRAIN, *DDP, "--exp-name", "launched",
        cwd=tmp_path,
    )  # fmt: skip
    assert "engine colossalai on cpu" in launched
    assert "plugin ddp: 2 ranks" in launched
    call("osora", *TRAIN, *DDP, "--exp-name", "own", "--nproc", "2", cwd=tmp_path)
    call("osora", *TRAIN, "--plugin", "ddp", "--engine", "native", "--exp-name", "native", "--nproc", "2", cwd=tmp_path)
    losses = {}
    for name in ("launched", "own", "native"):
        (folder,) = (tmp_path / "outputs" / name).glob("epoch*")
        assert verify(folder).verdict == "ok"
        assert json.loads((folder / "manifest.json").read_text())["ranks"] == 2
        lines = (tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        assert set(CheckpointReader(folder).groups()) >= {"model", "optimizer", "ema"}
    assert losses["launched"] == losses["own"]
    assert losses["own"] == pytest.approx(losses["native"], rel=1e-4)
