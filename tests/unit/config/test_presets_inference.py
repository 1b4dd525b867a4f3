"""The configs of `osora infer reconstruct`: the seed's values, and networks that can be built from them."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from support.golden import load_json

from osora_cli.config.freeze import to_plain
from osora_cli.config.load import load_config
from osora_cli.config.models.autoencoder import check, compression, is_causal, tile_names
from osora_cli.config.schema import ReconstructConfig


def listed(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("name", "ratios", "causal", "tiles"),
    [("video_dc_ae", (4, 32), False, (256, 32)), ("hunyuanvideo_vae", (4, 8), True, (256, 64))],
)
def test_presets_have_the_values_of_the_seed(
    name: str, ratios: tuple[int, int], causal: bool, tiles: tuple[int, int]
) -> None:
    golden = ast.literal_eval(load_json("config_resolved")["configs"][f"configs/vae/inference/{name}.py"]["repr"])
    config = load_config(name, ReconstructConfig, default="vae/inference/video_dc_ae").config
    plain = listed(to_plain(config))
    golden.pop("plugin", None)  # not used
    for key, value in listed(golden).items():
        mine = plain[key]
        if isinstance(value, dict) and key != "bucket_config":
            mine = {inner: mine[inner] for inner in value}
        assert mine == value, key
    model = config.model
    check(model)
    assert compression(model) == ratios
    assert is_causal(model) == causal
    assert tuple(getattr(model, key) for key in tile_names(model)) == tiles
    # Windows that the net gives back whole.
    (frames,) = config.bucket_config["512px_ar1:1"]
    assert (frames - causal) % ratios[0] == 0
