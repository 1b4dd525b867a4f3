"""`osora report`: on a real run, and on records whose truth is known."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.process import osora
from support.tiny import make_table, write_config

PLOTS = {"losses", "scores", "learning_rate", "save_stalls", "step_time"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 130 updates of a very small net, scored twice on the way."""
    home = tmp_path_factory.mktemp("report")
    make_table(home)
    coder: dict[str, Any] = {"width_list": [8, 8], "depth_list": [1, 1]}
    model = {
        "type": "dc_ae",
        "latent_channels": 4,
        "encoder": {**coder, "temporal_downsample": [True, False]},
        "decoder": {**coder, "temporal_upsample": [True, False]},
    }
    changes: dict[str, Any] = {"model": model, "optim": {"lr": 3e-3}, "eval": {"number": 2, "lpips": False}}
    config = write_config(home, max_steps=130, ckpt_every=60, eval_every=100, **changes)
    finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", home, cwd=home)
    assert finished.code == 0, finished.stderr
    # What the log says of the curve at the last evaluation is what the report says of it later.
    (home / "log").write_text(finished.stderr)
    return home / "run"


def test_report_of_a_real_run(trained: Path, tmp_path: Path) -> None:
    finished = osora("report", trained, "--output", tmp_path / "out", "--json", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    told = finished.json()
    assert told["updates"] == 130
    assert told["loss"] == "rec_per_pixel"
    assert [e["step"] for e in told["evaluations"]] == [0, 100, 130]
    assert [s["step"] for s in told["saves"]] == [60, 120, 130]
    assert told["trend"]["records"] >= 40
    assert told["trend"]["status"] in ("falling", "unclear", "flat")
    assert told["trend"]["low"] <= told["trend"]["fall_per_1000_updates"] <= told["trend"]["high"]
    assert f"\n{told['verdict']}\n" in (trained.parent / "log").read_text()
    assert set(told["plots"]) == PLOTS
    for path in map(Path, told["plots"].values()):
        pixels = np.asarray(Image.open(path).convert("L"))
        assert pixels.shape == (420, 900)
        assert (pixels < 200).mean() > 0.005, "something is drawn"
    page = Path(told["page"]).read_text()
    assert told["verdict"] in page
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == len(PLOTS)
    assert all(Image.open(io.BytesIO(b64decode(image))).size == (900, 420) for image in images)
    assert not re.search(r'(src|href)="(?!data:)', page), "needs no other file"


def test_text_and_a_checkpoint_in_place_of_its_run(trained: Path, tmp_path: Path) -> None:
    newest = trained / (trained / "latest").read_text().strip()
    finished = osora("report", newest, "--output", tmp_path, cwd=tmp_path)
    assert finished.code == 0
    assert "rec_per_pixel" in finished.stdout.splitlines()[0]
    assert re.search(r"^psnr_ema +\d", finished.stdout, re.MULTILINE)
    assert finished.stdout.rstrip().endswith(str(tmp_path / "report.html"))


def write_run(folder: Path, losses: Any, command: str) -> Path:
    """A run's records as they would be left: a resume's repetition and a cut line included."""
    folder.mkdir()
    steps = np.arange(1, len(losses) + 1) * 10
    lines = [
        json.dumps({"step": int(s), "lr": 1e-4, "loss": 1.0, "rec_per_pixel": float(v)})
        for s, v in zip(steps, losses, strict=True)
    ]
    text = "\n".join([*lines[:50], *lines[20:]]) + '\n{"step": 9'
    (folder / "metrics.jsonl").write_text(text)
    facts = {"run_id": "1", "command": command, "config_name": "c", "created": "now", "osora": "0"}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("command", ["train vae", "train diffusion"])
def test_the_advice_once_the_loss_is_flat(tmp_path: Path, command: str) -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, 900)
    bent = np.minimum(np.arange(1, 901), 300) ** -0.3 * np.exp(noise)
    run = write_run(tmp_path / "run", bent, command)
    told = osora("report", run, "--json", cwd=tmp_path).json()
    assert told["trend"]["status"] == "flat"
    assert 2000 <= told["trend"]["flat_since"] <= 4500
    assert told["verdict"].startswith(f"rec_per_pixel is flat since update {told['trend']['flat_since']}")
    advised = f"add the discriminator: `osora train vae-disc CONFIG --from-pretrained {run}`"
    assert told["verdict"].endswith(advised) == (command == "train vae")
    assert set(told["plots"]) == {"losses", "learning_rate"}
    assert Path(told["page"]) == run / "report" / "report.html"


def test_still_falling(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, 900)
    run = write_run(tmp_path / "run", np.arange(1, 901) ** -0.3 * np.exp(noise), "train vae")
    first = osora("report", run, cwd=tmp_path).stdout.splitlines()[0]
    found = re.fullmatch(r"rec_per_pixel is still falling by ([\d.]+) % per 1,000 updates \(95%: .*", first)
    assert found is not None, first
    assert float(found[1]) == pytest.approx(100 * (1 - np.exp(-0.3 * 1000 / 7500)), rel=0.15)


@pytest.mark.parametrize(("name", "words"), [("none", "does not exist"), ("empty", "holds no metrics.jsonl")])
def test_no_run(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    finished = osora("report", tmp_path / name, cwd=tmp_path)
    assert (finished.code, finished.stdout) == (2, "")
    assert words in finished.stderr
