"""The 11.9 billion parameter configurations, built without storage, against the manifests of the released weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import assert_keys, golden_dir, load_json

from osora_cli.config.models.flux import FluxConfig
from osora_cli.model.mmdit import MMDiT

MANIFESTS = sorted(path.stem for path in (golden_dir() / "manifests").glob("mmdit_*.json"))
FLUX_1_DEV = {
    "in_channels": 64,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "guidance_embed": True,
}


def build_on_meta(config: dict[str, Any]) -> MMDiT:
    with torch.device("meta"):
        return MMDiT(FluxConfig(**config))


def test_there_are_manifests() -> None:
    assert MANIFESTS


@pytest.mark.parametrize("name", MANIFESTS)
def test_keys_shapes_order_and_count(name: str) -> None:
    manifest = load_json(f"manifests/{name}")
    model = build_on_meta(manifest["config"])
    assert_keys({key: shape for key, (shape, _) in manifest["state_dict"].items()}, model)
    assert sum(p.numel() for p in model.parameters()) == manifest["total_params"]
    assert [key for key, _ in model.named_buffers()] == manifest["buffers"]
    assert [key for key, p in model.named_parameters() if not p.requires_grad] == manifest["frozen_params"]
    # Parameter order is what optimizer states are numbered by.
    assert [key for key, _ in model.named_parameters()] == list(manifest["state_dict"])


def test_flux_1_dev_has_its_published_number_of_parameters() -> None:
    model = build_on_meta(FLUX_1_DEV)
    assert sum(p.numel() for p in model.parameters()) == 11_901_408_320
    keys = set(model.state_dict())
    assert {
        "guidance_in.in_layer.weight",
        "double_blocks.18.txt_attn.qkv.bias",
        "single_blocks.37.linear1.bias",
    } <= keys
