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

from osora_cli.app.reconstruct.clips import ClipPlan
from osora_cli.app.reconstruct.output import ClipSink, Files
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import read_frames, write_video
from osora_cli.metrics.checkerboard import grid_energy, space_energy
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
    error = (rebuilt - given)[0].transpose(0, 1)
    space, time = space_energy(error, 2), grid_energy(error, 0, 2)
    assert score.checkerboard_space == pytest.approx(space.share, rel=1e-3)
    assert score.checkerboard_space_ratio == pytest.approx(space.ratio, rel=1e-3)
    assert score.checkerboard_time == pytest.approx(time.share, rel=1e-3)
    assert score.checkerboard_time_ratio == pytest.approx(time.ratio, rel=1e-3)
    assert result.mean["checkerboard_space"] == score.checkerboard_space
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


def sink_of(folder: Path, frames: int, size: tuple[int, int], periods: tuple[int, int]) -> ClipSink:
    for side in ("orig", "recn"):
        (folder / side).mkdir(parents=True, exist_ok=True)
    plan = ClipPlan("c", 0, "c.mp4", Path("c.mp4"), np.arange(frames), size, False, 24.0, False)
    return ClipSink(plan, Files(folder, ("orig", "recn")), periods, shown=False)


def test_a_grid_in_the_reconstruction_is_seen_in_space_and_in_time(tmp_path: Path) -> None:
    original = torch.full((16, 3, 64, 64), 100, dtype=torch.uint8)
    noise = 0.02 * torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
    columns = 0.03 * (torch.arange(64) % 8 == 0).float()
    pulse = 0.03 * (torch.arange(16) % 4 == 0).float().view(-1, 1, 1, 1)
    got = {}
    for name, grid in (("noise", torch.zeros(1)), ("columns", columns), ("pulse", pulse)):
        sink = sink_of(tmp_path, 16, (64, 64), (4, 8))
        rebuilt = original / 127.5 - 1 + noise + grid
        # Two parts, as tiles give them.
        for part in (slice(0, 8), slice(8, 16)):
            sink.add(original[part], rebuilt[part], (4, 2, 8, 8), 0)
        got[name] = sink.finish()
    assert got["noise"].checkerboard_space_ratio == pytest.approx(1, abs=0.1)
    assert got["noise"].checkerboard_time_ratio == pytest.approx(1, abs=0.1)
    assert got["columns"].checkerboard_space_ratio > 2
    assert got["columns"].checkerboard_time_ratio == pytest.approx(1, abs=0.1)
    assert got["pulse"].checkerboard_time_ratio > 1.5
    assert got["pulse"].checkerboard_space_ratio == pytest.approx(1, abs=0.1)


def test_the_first_frame_of_a_causal_net_begins_no_period(tmp_path: Path) -> None:
    original = torch.full((9, 3, 64, 64), 100, dtype=torch.uint8)
    noise = 0.02 * torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
    error = noise + 0.03 * (torch.arange(9) % 4 == 1).float().view(-1, 1, 1, 1)
    sink = sink_of(tmp_path, 9, (64, 64), (4, 8))
    rebuilt = original / 127.5 - 1 + error
    sink.add(original, rebuilt, (4, 3, 8, 8), 0, 1)
    score = sink.finish()
    wanted = grid_energy(error[1:] / 2, 0, 4)
    assert score.checkerboard_time == pytest.approx(wanted.share, rel=1e-3)
    assert wanted.harmonic / wanted.total > 0.5


def test_clips_of_less_than_two_periods_have_no_checkerboard(tmp_path: Path) -> None:
    original = torch.full((7, 3, 60, 40), 100, dtype=torch.uint8)
    sink = sink_of(tmp_path, 7, (60, 40), (4, 32))
    sink.add(original, original / 127.5 - 0.9, (4, 2, 2, 2), 0)
    score = sink.finish()
    assert score.checkerboard_space is score.checkerboard_space_ratio is None
    assert score.checkerboard_time is score.checkerboard_time_ratio is None
