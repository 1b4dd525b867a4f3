"""The two kinds of autoencoder, whole and in tiles, against the networks themselves."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.clips import frame_numbers, make_clip, pictures
from support.recon import config, weights

from osora_cli.app.reconstruct.find import find_autoencoder
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.config.schema import ReconstructConfig
from osora_cli.data.media import probe, read_frames, write_video
from osora_cli.errors import ConfigError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae

HUNYUAN: dict[str, Any] = {
    "type": "hunyuan_vae",
    "block_out_channels": [4, 4, 8, 8],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
}


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = HunyuanVae(HunyuanVaeConfig.model_validate(HUNYUAN))
    model.reset_parameters(0)
    file = tmp_path_factory.mktemp("hunyuan") / "hunyuan.safetensors"
    save_file(model.state_dict(), file)
    return file


def network(file: Path, **more: Any) -> HunyuanVae:
    model = HunyuanVae(HunyuanVaeConfig.model_validate({**HUNYUAN, **more}))
    model.load_state_dict(load_file(file))
    return model.eval()


def record(calls: list[tuple[int, int, str, float]], *call: Any) -> None:
    calls.append(call)


def psnr_of(given: torch.Tensor, rebuilt: torch.Tensor) -> float:
    """Of a clip in [-1, 1], as metrics.json has it."""
    error = given.double() / 2 - (rebuilt.double() / 2 + 0.5).clamp(0, 1) + 0.5
    return -10 * math.log10(error.square().mean().item())


def as_clip(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def test_hunyuan_is_its_network_at_the_mean_of_the_posterior(tmp_path: Path, hunyuan: Path) -> None:
    frames = pictures(9, (64, 48))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    result = reconstruct(config(tmp_path / "c.mp4", hunyuan, tmp_path / "out", model=HUNYUAN))
    (score,) = result.clips
    given = as_clip(frames)
    with torch.no_grad():
        rebuilt, _, z = network(hunyuan)(given, sample_posterior=False)
    assert score.psnr == pytest.approx(psnr_of(given, rebuilt), abs=1e-3)
    assert score.latent_numbers == z.numel() == 4 * 3 * 6 * 8
    assert score.checkerboard_space is not None
    # Eight frames after the first: two periods of four.
    assert score.checkerboard_time is not None
    assert (result.protocol["model"], result.protocol["latent"]) == ("hunyuan_vae", "mean of the posterior")
    assert result.protocol["checkerboard_periods"] == {"frames": 4, "pixels": 8}


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 12, 23])
def test_hunyuan_gives_back_any_length_and_size(tmp_path: Path, hunyuan: Path, frames: int) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=frames, size=(66, 50), fps=15)
    tiled = {"use_temporal_tiling": True, "use_spatial_tiling": True, "sample_tsize": 8, "sample_size": 32}
    for name, more in (("whole", {}), ("tiled", tiled)):
        (score,) = reconstruct(config(clip, hunyuan, tmp_path / name, model={**HUNYUAN, **more})).clips
        info = probe(tmp_path / name / score.recn)
        assert (info.num_frames, info.width, info.height, info.fps) == (frames, 66, 50, 15)
        assert frame_numbers(read_frames(tmp_path / name / score.orig, range(frames))) == [*range(frames)]
        assert math.isfinite(score.psnr)


def test_hunyuan_in_tiles_is_its_network_in_tiles(tmp_path: Path, hunyuan: Path) -> None:
    frames = pictures(21, (64, 48))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    tiles = {"use_temporal_tiling": True, "use_spatial_tiling": True, "sample_tsize": 8, "sample_size": 32}
    (score,) = reconstruct(config(tmp_path / "c.mp4", hunyuan, tmp_path / "out", model={**HUNYUAN, **tiles})).clips
    given = as_clip(frames)
    with torch.no_grad():
        rebuilt, _, z = network(hunyuan, **tiles)(given, sample_posterior=False)
    assert score.psnr == pytest.approx(psnr_of(given, rebuilt), abs=1e-3)
    assert score.latent_numbers == z.numel()


def test_hunyuan_keeps_fp32_weights_in_bf16(tmp_path: Path, hunyuan: Path) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=5, size=(64, 48))
    exact, mixed = (
        reconstruct(config(clip, hunyuan, tmp_path / dtype, model=HUNYUAN, dtype=dtype)) for dtype in ("fp32", "bf16")
    )
    assert (mixed.protocol["dtype"], mixed.protocol["weights_dtype"]) == ("bf16", "float32")
    assert mixed.clips[0].psnr != exact.clips[0].psnr
    assert mixed.clips[0].psnr == pytest.approx(exact.clips[0].psnr, abs=0.05)


def test_dc_ae_in_tiles_is_its_network_in_tiles_whatever_the_length(tmp_path: Path, run: Path) -> None:
    """A long clip is streamed: read span by span, and never whole in memory."""
    tiles = {"use_temporal_tiling": True, "use_spatial_tiling": True}
    model = DcAe(find_autoencoder(config(tmp_path, run, tmp_path, model=tiles).model).config)
    model.load_state_dict(weights(105))
    for frames in (26, 33):
        pixels = pictures(frames, (64, 48))
        write_video(tmp_path / "c.mp4", pixels, 24, lossless=True)
        calls: list[tuple[int, int, str, float]] = []
        given_config = config(tmp_path / "c.mp4", run, tmp_path / "out", model=tiles)
        result = reconstruct(given_config, progress=partial(record, calls))
        given = as_clip(pixels)
        padded = torch.cat([given, given[:, :, -1:]], dim=2) if frames % 2 else given
        with torch.no_grad():
            rebuilt = model(padded)[0][:, :, :frames]
        (score,) = result.clips
        assert score.psnr == pytest.approx(psnr_of(given, rebuilt), abs=1e-3)
        assert score.latent_numbers == 4 * -(-frames // 2) * 24 * 32
        shares = [call[3] for call in calls]
        assert shares == sorted(shares)
        assert len(shares) > 8
        assert shares[-1] == 1
        assert result.protocol["frames_per_piece"] == "whole clip"


def test_a_clip_of_many_tiles_is_read_in_spans(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    most = 0

    def counted(path: Path, indices: list[int]) -> np.ndarray:
        nonlocal most
        most = max(most, len(indices))
        return read_frames(path, indices)

    monkeypatch.setattr("osora_cli.app.reconstruct.clips.read_frames", counted)
    clip = make_clip(tmp_path / "c.mp4", frames=70, size=(64, 48))
    (score,) = reconstruct(config(clip, run, tmp_path / "out", model={"use_temporal_tiling": True})).clips
    assert score.frames == 70
    assert most == 8


def test_the_model_section_is_told_apart_by_type() -> None:
    read = ReconstructConfig.model_validate
    assert read({"model": {"type": "hunyuan_vae", "sample_size": 64}}).model.type == "hunyuan_vae"
    assert read({"model": {"latent_channels": 4}}).model.type == read({}).model.type == "dc_ae"


def test_a_run_of_another_type_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="trains `dc_ae`, this config's model is `hunyuan_vae`"):
        find_autoencoder(HunyuanVaeConfig(from_pretrained=str(run)))


def test_hunyuan_tiles_that_are_no_whole_latents_are_refused_before_anything_is_made(
    tmp_path: Path, hunyuan: Path
) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=5, size=(64, 48))
    model = {**HUNYUAN, "use_temporal_tiling": True, "sample_tsize": 10}
    with pytest.raises(ConfigError, match="sample_tsize"):
        reconstruct(config(clip, hunyuan, tmp_path / "out", model=model))
    assert not (tmp_path / "out").exists()
