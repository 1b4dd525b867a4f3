"""Validation in a run of several ranks: its scores are those of one process, and training does not notice it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.process import osora
from support.ranked import run_ranks

EVAL: dict[str, Any] = {"number": 3, "lpips": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval-ranks")
    tiny.make_table(path, clips=9)
    tiny.write_config(path, ckpt_every=0, max_steps=3, log_every=1, eval=EVAL)
    return path


def kinds(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Updates and evaluations, without what takes different times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in r.items() if not k.endswith("_s") and k != "peak_memory_gib"} for r in lines]
    return [r for r in plain if "kind" not in r], [r for r in plain if r.get("kind") == "eval"]


@pytest.mark.parametrize("plugin", ["ddp", "zero3"])
def test_scored_by_two_ranks(folder: Path, plugin: str) -> None:
    for name, every in (("plain", "0"), ("scored", "2")):
        argv = (
            "train",
            "vae",
            "tiny.yaml",
            "--exp-name",
            f"{name}-{plugin}",
            "--plugin",
            plugin,
            "--eval-every",
            every,
        )
        results = run_ranks(2, *argv, cwd=folder)
        assert [r.code for r in results] == [0, 0], results
    updates, none = kinds(folder / "outputs" / f"plain-{plugin}")
    scored, evaluations = kinds(folder / "outputs" / f"scored-{plugin}")
    assert none == []
    assert scored == updates
    assert [e["step"] for e in evaluations] == [0, 2, 3]
    assert evaluations[-1]["eval/psnr_ema"] != evaluations[-1]["eval/psnr_raw"]
    alone = osora("train", "vae", "tiny.yaml", "--exp-name", f"alone-{plugin}", "--eval-every", "9", "--max-steps", "1",
                  cwd=folder)  # fmt: skip
    assert alone.code == 0, alone.stderr
    first = kinds(folder / "outputs" / f"alone-{plugin}")[1][0]
    assert evaluations[0] == pytest.approx(first, abs=1e-4)
