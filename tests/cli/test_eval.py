"""Validation while training: it scores what it says, and the run with it equals the run without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.disc import write_disc_config
from support.process import Finished, osora
from support.tiny import make_table, write_config
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

UPDATES = 5
EVAL: dict[str, Any] = {"number": 3, "lpips": False}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    make_table(folder)
    return folder


def run(home: Path, name: str, *argv: str, **changes: Any) -> Path:
    """A training to its end; its folder."""
    folder = home / name
    folder.mkdir()
    write_config(folder, **{"max_steps": UPDATES, **changes})
    finished = osora("train", "vae", folder / "tiny.yaml", "--exp-name", "run", "--outputs", folder, *argv, cwd=home)
    assert finished.code == 0, finished.stderr
    return folder / "run"


def kinds(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The logged updates without their times, and the evaluations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [{k: v for k, v in r.items() if not k.endswith("_s")} for r in lines if "kind" not in r]
    return updates, [r for r in lines if r.get("kind") == "eval"]


def saved(folder: Path) -> dict[str, bytes]:
    """Everything that the last checkpoint holds of tensors and small state, bit for bit."""
    newest = folder / (folder / "latest").read_text().strip()
    found = {}
    for path in sorted(newest.rglob("*.safetensors")):
        found |= {f"{path.relative_to(newest)}/{k}": t.numpy().tobytes() for k, t in _plain(load_file(path)).items()}
    for path in sorted(newest.rglob("*.json")):
        if "rng" in path.name or "running" in path.name:
            found[str(path.relative_to(newest))] = path.read_bytes()
    if (newest / "ema.pt").exists():
        average = torch.load(newest / "ema.pt", weights_only=True)
        found |= {f"ema/{k}": t.numpy().tobytes() for k, t in average.items()}
    assert any(name.startswith("ema") for name in found)
    return found


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: t.view(torch.int16) if t.dtype == torch.bfloat16 else t for k, t in tensors.items()}


@pytest.fixture(scope="module")
def scored(home: Path) -> dict[str, Path]:
    return {d: run(home, f"scored-{d}", "--eval-every", "2", dtype=d, eval=EVAL) for d in ("fp32", "bf16")}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_is_scored_equals_the_run_that_is_not(home: Path, scored: dict[str, Path], dtype: str) -> None:
    without = run(home, f"plain-{dtype}", dtype=dtype)
    assert kinds(scored[dtype])[0] == kinds(without)[0]
    assert kinds(without)[1] == []
    assert saved(scored[dtype]) == saved(without)


def test_a_second_stage_that_is_scored_equals_one_that_is_not(
    home: Path, scored: dict[str, Path], tmp_path: Path
) -> None:
    config = write_disc_config(tmp_path, max_steps=4, eval=EVAL)
    argv = ("train", "vae-disc", config, "--from-pretrained", scored["fp32"], "--outputs", tmp_path)
    for name, every in (("plain", "0"), ("scored", "1")):
        finished = osora(*argv, "--exp-name", name, "--eval-every", every, cwd=home)
        assert finished.code == 0, finished.stderr
    assert kinds(tmp_path / "scored")[0] == kinds(tmp_path / "plain")[0]
    assert [r["step"] for r in kinds(tmp_path / "scored")[1]] == [0, 1, 2, 3, 4]
    assert saved(tmp_path / "scored") == saved(tmp_path / "plain")


def test_what_is_left_of_an_evaluation(scored: dict[str, Path]) -> None:
    folder = scored["fp32"]
    _, evaluations = kinds(folder)
    assert [r["step"] for r in evaluations] == [0, 2, 4, 5]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/psnr_ema"] == first["eval/psnr_raw"], "nothing is trained yet"
    assert last["eval/psnr_ema"] != last["eval/psnr_raw"]
    assert {r["eval/psnr_constant_colour"] for r in evaluations} == {first["eval/psnr_constant_colour"]}
    assert all(
        -1 <= r[f"eval/ssim_{w}"] <= 1 and 5 < r[f"eval/psnr_{w}"] < 40 for r in evaluations for w in ("ema", "raw")
    )
    assert "scored at update 4: psnr_ema" in (folder / "log.txt").read_text()
    pictures = sorted((folder / "eval").iterdir())
    assert [p.name for p in pictures] == [f"update{n:07d}-clips.png" for n in (0, 2, 4, 5)]
    shown = np.asarray(Image.open(pictures[-1]))
    assert shown.ndim == 3
    assert shown.std() > 10
    (events,) = (folder / "tensorboard").iterdir()
    tags: dict[str, list[int]] = {}
    for event in EventFileLoader(str(events)).Load():
        for value in event.summary.value:
            tags.setdefault(value.tag, []).append(event.step)
    assert tags["eval/psnr_ema"] == tags["eval/clips"] == [0, 2, 4, 5]


def test_scored_when_it_goes_on(home: Path, tmp_path: Path, scored: dict[str, Path]) -> None:
    """Stopped at 3 and resumed: the same updates, weights and scores; nothing stands twice."""
    config = write_config(tmp_path, eval=EVAL, eval_every=2)
    folder = tmp_path / "run"
    argv = ("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--max-steps", "3")
    assert osora(*argv, cwd=home).code == 0
    assert osora("resume", folder, "--max-steps", str(UPDATES), cwd=home).code == 0
    straight, broken = kinds(scored["fp32"]), kinds(folder)
    assert broken[0] == straight[0]
    assert saved(folder) == saved(scored["fp32"])
    assert [r["step"] for r in broken[1]] == [0, 2, 3, 4, 5], "3 was the last update once"
    values = [
        {r["step"]: {k: v for k, v in r.items() if not k.endswith("_s")} for r in e} for e in (broken[1], straight[1])
    ]
    assert {step: values[0][step] for step in values[1]} == values[1]


def failing(home: Path, tmp_path: Path, **changes: Any) -> Finished:
    config = write_config(tmp_path, max_steps=2, eval_every=1, **changes)
    return osora("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, cwd=home)


def test_a_clip_that_cannot_be_read_is_named_before_anything_is_trained(home: Path, tmp_path: Path) -> None:
    rows = (home / "clips.csv").read_text().splitlines()
    (tmp_path / "broken.mp4").write_bytes(b"no film")
    held = [rows[0], rows[1], rows[3].replace("clip2.mp4", str(tmp_path / "broken.mp4"))]
    (tmp_path / "held.csv").write_text("\n".join(held) + "\n")
    finished = failing(home, tmp_path, eval={**EVAL, "table": str(tmp_path / "held.csv")})
    assert finished.code == 3
    assert f"1 of the 3 clips to be scored on cannot be read: `{tmp_path / 'broken.mp4'}` (row 1)" in finished.stderr
    assert "update 1" not in finished.stderr


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"rows": [5]}, 2, "`eval.rows` is `[5]`"),
        ({"frames": 64}, 3, "no clip of the table is long and large enough to be scored on: `clip0.mp4` (row 0)"),
        ({"frames": 7}, 2, "a clip of `7` frames does not come back"),
        ({"table": "none.csv"}, 3, "none.csv"),
    ],
)
def test_what_cannot_be_scored_on_is_said_at_once(
    home: Path, tmp_path: Path, given: dict[str, Any], code: int, words: str
) -> None:
    finished = failing(home, tmp_path, eval={**EVAL, **given})
    assert (finished.code, words in finished.stderr) == (code, True), finished.stderr
    assert not (tmp_path / "run").exists()
