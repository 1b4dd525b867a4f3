"""Any length and size: as many frames of the same size come out as went in, tiled and in pieces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from support.clips import frame_numbers, make_clip, real_clip
from support.recon import config

from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.data.media import probe, read_frames
from osora_cli.model.dc_ae.autoencoder import DcAe

LENGTHS = (1, 3, 17, 18, 40, 132)
SIZES = ((161, 97), (64, 192), (1280, 720))  # width, height
_SIDE = {"width_list": [2, 4, 8], "depth_list": [1, 1, 1], "block_type": "ResBlock"}
# Compression of f32t4c128 in time, and tiles as it is used with; fewer and narrower stages.
NET: dict[str, Any] = {
    "latent_channels": 4,
    "encoder": {**_SIDE, "temporal_downsample": [True, True, False]},
    "decoder": {**_SIDE, "temporal_upsample": [True, True, False]},
    "spatial_tile_size": 256,
    "temporal_tile_size": 32,
}
TILED = {"use_spatial_tiling": True, "use_temporal_tiling": True}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = DcAe(DcAeConfig.model_validate(NET))
    model.reset_parameters(0)
    file = tmp_path_factory.mktemp("net") / "net.safetensors"
    save_file(model.state_dict(), file)
    return file


def clip_of(folder: Path, frames: int, size: tuple[int, int]) -> Path:
    if (frames, size) == (132, (1280, 720)):
        return real_clip("bigbuckbunny")
    return make_clip(folder / "clip.mp4", frames=frames, size=size, fps=15, pix_fmt="yuv444p", gop=6)


def check(tmp_path: Path, net: Path, frames: int, size: tuple[int, int], model: dict[str, Any]) -> None:
    clip = clip_of(tmp_path, frames, size)
    (score,) = reconstruct(config(clip, net, tmp_path / "out", model={**NET, **model})).clips
    wanted = probe(clip)
    assert (wanted.num_frames, wanted.width, wanted.height) == (frames, *size)
    assert (score.frames, score.width, score.height) == (frames, *size)
    for name in (score.orig, score.recn):
        info = probe(tmp_path / "out" / name)
        assert (info.num_frames, info.width, info.height, info.fps) == (frames, *size, wanted.fps)
    assert score.side_by_side is not None
    pair = probe(tmp_path / "out" / score.side_by_side)
    assert (pair.num_frames, pair.width, pair.height) == (frames, 2 * size[0], size[1])
    written = read_frames(tmp_path / "out" / score.orig, range(frames))
    if clip.stem == "clip":
        assert frame_numbers(written) == [*range(frames)]
    else:
        assert np.abs(written[-1].astype(int) - read_frames(clip, [frames - 1])[0].astype(int)).mean() < 4
    assert math.isfinite(score.psnr)
    assert (score.flicker is None) == (frames == 1)


@pytest.mark.parametrize(
    ("frames", "size", "model"),
    [(1, SIZES[0], TILED), (3, SIZES[1], TILED), (18, SIZES[0], {}), (40, SIZES[0], TILED), (17, SIZES[1], {})],
)
def test_frames_and_size_as_given(
    tmp_path: Path, net: Path, frames: int, size: tuple[int, int], model: dict[str, Any]
) -> None:
    check(tmp_path, net, frames, size, model)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [TILED, {}], ids=["tiled", "in-pieces"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("frames", LENGTHS)
def test_every_length_and_size(
    tmp_path: Path, net: Path, frames: int, size: tuple[int, int], model: dict[str, Any]
) -> None:
    check(tmp_path, net, frames, size, model)
