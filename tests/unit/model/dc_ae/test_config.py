"""What follows from a DC-AE config without building it, and what is wrong with one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support.dc_ae import light_config, small_config

from osora_cli.config.models.dc_ae import (
    DcAeConfig,
    TileAxis,
    check_clip,
    compression,
    latent_channels,
    plan,
    tile_axes,
)
from osora_cli.errors import ConfigError

FULL = DcAeConfig(model_name="dc-ae-f32t4c128")


def changed(section: str, **values: Any) -> DcAeConfig:
    plain = small_config().model_dump()
    plain[section].update(values)
    return DcAeConfig.model_validate(plain)


def test_the_known_architecture() -> None:
    made = plan(FULL)
    assert (compression(FULL), latent_channels(FULL), made.in_channels) == ((4, 32), 128, 3)
    assert made.encoder.widths == made.decoder.widths == (128, 256, 512, 512, 1024, 1024)
    assert made.encoder.depths == (2, 2, 2, 3, 3, 3)
    assert made.decoder.depths == (3, 3, 3, 3, 3, 3)
    assert made.encoder.temporal == made.decoder.temporal == (False, False, False, True, True, False)
    assert made.encoder.blocks == ("ResBlock",) * 3 + ("EViTS5_GLU",) * 3
    assert made.decoder.out_act == "relu"


@pytest.mark.parametrize(("time", "space"), [(1, 1), (1, 8), (2, 4), (4, 8), (8, 16)])
def test_compression_follows_from_the_stages(time: int, space: int) -> None:
    assert compression(light_config(time, space)) == (time, space)


def test_one_block_type_stands_for_all_and_no_flags_for_none() -> None:
    coder = {"width_list": [8, 16], "depth_list": [1, 1]}
    config = DcAeConfig.model_validate(
        {
            "latent_channels": 4,
            "encoder": {**coder, "temporal_downsample": []},
            "decoder": {**coder, "temporal_upsample": []},
        }
    )
    assert plan(config).encoder.blocks == ("ResBlock", "ResBlock")
    assert compression(config) == (1, 2)


def test_stated_ratios_may_be_right() -> None:
    assert compression(small_config(time_compression_ratio=4, spatial_compression_ratio=8)) == (4, 8)


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        (DcAeConfig(), ["names no architecture"]),
        (DcAeConfig(model_name="dc-ae-f32t4c12"), ["unknown model_name `dc-ae-f32t4c12`", "`dc-ae-f32t4c128`"]),
        (small_config(model_name="dc-ae-f32t4c128"), ["has 128", "encoder and", "decoder and"]),
        (DcAeConfig(latent_channels=4), ["needs `model.encoder` and `model.decoder`"]),
        (small_config(time_compression_ratio=8), ["time_compression_ratio is `8`, the stages give 4"]),
        (small_config(spatial_compression_ratio=16), ["spatial_compression_ratio is `16`, the stages give 8"]),
        (small_config(latent_channels=5), ["`5` does not divide the last width of model.encoder, `64`", "decoder"]),
        (small_config(latent_channels=0), ["latent_channels is `0`"]),
        (small_config(in_channels=0), ["in_channels is `0`"]),
        (changed("encoder", depth_list=[1, 1]), ["encoder.depth_list has 2 entries", "width_list has 4"]),
        (changed("decoder", block_type=["ResBlock"]), ["decoder.block_type has 1 entries"]),
        (changed("encoder", temporal_downsample=[True]), ["encoder.temporal_downsample has 1 entries"]),
        (changed("encoder", depth_list=[1, 0, 1, -1]), ["depth_list[1] is `0`", "depth_list[3] is `-1`"]),
        (changed("decoder", width_list=[8, 40, 32, 64]), ["width_list[1] is `40`, EViT_GLU needs a multiple of 32"]),
        (changed("encoder", width_list=[4, 32, 32, 64]), ["width_list[1] is `32`, it has to divide 4 x 4"]),
        (
            changed("encoder", temporal_downsample=[False, False, False, True]),
            ["temporal_downsample ends with `true`"],
        ),
        (
            changed("encoder", temporal_downsample=[False, False, True, False]),
            ["halves time 1 times, model.decoder doubles it 2 times"],
        ),
        (
            changed("decoder", width_list=[8], depth_list=[1], block_type="ResBlock", temporal_upsample=[]),
            ["model.encoder has 4 stages, model.decoder 1"],
        ),
        (
            changed("decoder", width_list=[], depth_list=[], block_type="ResBlock", temporal_upsample=[]),
            ["decoder.width_list is empty"],
        ),
    ],
)
def test_what_does_not_fit_is_said(config: DcAeConfig, faults: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config)
    for fault in faults:
        assert fault in caught.value.message


def test_all_faults_at_once() -> None:
    config = changed("encoder", width_list=[8, 33, 32, 64], depth_list=[1, 0, 1, 1], temporal_downsample=[True])
    with pytest.raises(ConfigError) as caught:
        plan(config)
    assert len(caught.value.message.splitlines()) == 5


@pytest.mark.parametrize("frames", [1, 8, 12, 32])
def test_clips_that_the_full_net_takes(frames: int) -> None:
    check_clip(FULL, frames, 256, 32)


@pytest.mark.parametrize(
    ("time", "takes"),
    [(1, {1, 2, 3, 4, 5, 6, 7, 8, 9}), (2, {1, 4, 6, 8}), (4, {1, 8}), (8, {1})],
)
def test_frames_of_every_time_compression(time: int, takes: set[int]) -> None:
    taken = set()
    for frames in range(10):
        try:
            check_clip(light_config(time, 8), frames, 8, 8)
            taken.add(frames)
        except ConfigError:
            pass
    assert taken == takes


@pytest.mark.parametrize(
    ("size", "near"),
    [
        ((2, 64, 64), "frames 1 or 8"),
        ((4, 64, 64), "frames 1 or 8"),
        ((9, 64, 64), "frames 8 or 12"),
        ((31, 64, 64), "frames 28 or 32"),
        ((8, 65, 64), "height 64 or 96 px"),
        ((8, 64, 20), "width 32 px"),
        ((1, 1, 0), "height 32 px, width 32 px"),
    ],
)
def test_the_nearest_sizes_are_named(size: tuple[int, int, int], near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_clip(FULL, *size)
    assert caught.value.hint == f"nearest: {near}"
    assert "multiple of 4 from 8 on" in str(caught.value.allowed)


def test_default_tiles() -> None:
    config = FULL.model_copy(update={"use_spatial_tiling": True, "use_temporal_tiling": True})
    assert tile_axes(config) == (TileAxis(8, 2, 4), TileAxis(8, 2, 32))
    assert tile_axes(FULL) == (None, None)


def test_nothing_here_needs_torch() -> None:
    code = (
        "import sys; from osora_cli.config.models.dc_ae import DcAeConfig, check_clip;"
        "check_clip(DcAeConfig(model_name='dc-ae-f32t4c128'), 8, 32, 32);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
