"""The numbers of a reconstruction, and the protocol that goes with them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.clips import pictures
from support.recon import TRAINING, config, scores, weights, write_table

from osora_cli.app.reconstruct import reconstruct
from osora_cli.data.media import read_frames, write_video
from osora_cli.model.dc_ae.autoencoder import DcAe


def test_numbers_are_those_of_the_float_output(tmp_path: Path, run: Path) -> None:
    """Against the net itself, on a clip that fits it exactly."""
    frames = pictures(8, (64, 64))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    result = reconstruct(config(tmp_path / "c.mp4", run, tmp_path / "out"))
    model = DcAe(TRAINING.model)
    model.load_state_dict(weights(105))
    given = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 255
    with torch.no_grad():
        rebuilt = (model((given - 0.5) / 0.5)[0] / 2 + 0.5).clamp(0, 1)
    mse = (given.double() - rebuilt.double()).square().mean().item()
    (score,) = result.clips
    assert score.psnr == pytest.approx(-10 * math.log10(mse), abs=1e-4)
    assert result.mean["psnr"] == score.psnr
    change = (rebuilt - given).double().diff(dim=2).abs().mean().item()
    assert score.flicker == pytest.approx(change, abs=1e-6)
    flat = (given - given.mean((2, 3, 4), keepdim=True)).square().mean().item()
    assert score.constant_colour_psnr == pytest.approx(-10 * math.log10(flat), abs=1e-4)
    assert score.latent_numbers == 4 * 4 * 32 * 32
    assert score.latent_numbers <= score.block_numbers <= 1.05 * score.latent_numbers
    assert score.block_mean_psnr > score.constant_colour_psnr
    video = read_frames(tmp_path / "out" / score.recn, range(8)).astype(float) / 255
    assert np.abs(video - rebuilt[0].permute(1, 2, 3, 0).numpy()).mean() < 0.02


def test_metrics_json_holds_numbers_and_protocol(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    result = reconstruct(config(table, run, tmp_path / "out"))
    written = json.loads(result.metrics.read_text())
    assert written == result.to_json()
    assert written["mean"]["psnr"] == pytest.approx(np.mean(scores(result)))
    assert written["mean"]["ssim"] == pytest.approx(np.mean([clip.ssim for clip in result.clips]))
    protocol = written["protocol"]
    assert protocol["data"]["kind"] == "table"
    assert len(protocol["data"]["digest"]) == 32
    assert protocol["weights"] == {"path": str(run / "epoch0-global_step5"), "step": 5, "ema": True}
    assert protocol["data_range"] == 1.0
    assert protocol["torch"] == torch.__version__
    assert (protocol["clips"], protocol["frames"]) == (3, 41)
    assert protocol["sizes"] == ["64x64", "66x98", "70x50"]
    assert protocol["extent"] == "whole"
    assert protocol["window"] is None
    with Image.open(result.picture) as picture:
        assert min(picture.size) > 300
