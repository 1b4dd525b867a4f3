"""The HunyuanVideo VAE against golden values: blocks, small whole models, tiling, the full size, the manifest."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.golden import (
    assert_close,
    assert_keys,
    cases_of,
    fill_by_rule,
    golden_tensor,
    load_item,
    load_json,
    make_input,
)
from torch import Tensor, nn

from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig, latent_size
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.hunyuan_vae.layers import (
    CausalConv3d,
    Downsample,
    MidBlock,
    Resnet,
    Upsample,
    frame_causal_attention,
)

ITEM, _ = load_item("hunyuan_vae")
FULL, _ = load_item("hunyuan_full")
MANIFEST = load_json("manifests/hunyuan_vae")


def whole(case: dict[str, Any]) -> bool:
    return "config" in case


def groups_of(case: dict[str, Any]) -> int:
    """`groups 8` in the case's text, or in the last one before it that says so."""
    cases = ITEM["cases"]
    texts = [str(c.get("kwargs")) for c in cases[: cases.index(case) + 1]]
    return int(next(m[1] for m in (re.search(r"groups (\d+)", text) for text in reversed(texts)) if m))


def block_of(case: dict[str, Any]) -> nn.Module:
    """The block that a case's keys, shapes and text describe."""
    keys, text = case["keys"], str(case["kwargs"])
    (output,) = case["outputs"].values()
    in_shape, out_shape = case["inputs"]["x"]["shape"], output["shape"]
    if "conv.weight" in keys:
        stride = re.search(r"stride (\d),(\d),(\d)", text)
        out_channels, in_channels, kernel = keys["conv.weight"][:3]
        return CausalConv3d(
            in_channels, out_channels, kernel, tuple(map(int, stride.groups())) if stride else (1, 1, 1)
        )  # type: ignore[arg-type]
    if "conv.conv.weight" in keys:
        given = re.search(r"\((\d),(\d),(\d)\)", text)
        factor = tuple(map(int, given.groups())) if given else (2, 2, 2)
        kind = Upsample if out_shape[3] > in_shape[3] else Downsample
        return kind(in_shape[1], factor)  # type: ignore[arg-type]
    if "norm1.weight" in keys:
        return Resnet(in_shape[1], out_shape[1], groups_of(case))
    assert any(key.startswith("attentions.") for key in keys), case["id"]
    return MidBlock(in_shape[1], groups_of(case))


@pytest.mark.parametrize(
    "case", [p for p in cases_of("hunyuan_vae") if "keys" in p.values[0] and not whole(p.values[0])]
)
def test_blocks(case: dict[str, Any]) -> None:
    block = block_of(case)
    assert_keys(case["keys"], block)
    fill_by_rule(block)
    with torch.no_grad():
        assert_close(ITEM, case["outputs"]["out"], block(make_input(case["inputs"]["x"])))


@pytest.mark.parametrize("case", [p for p in cases_of("hunyuan_vae") if "keys" not in p.values[0]])
def test_mask(case: dict[str, Any]) -> None:
    """Which token sees which, read off the attention itself: with unit values its output is its weights."""
    want = golden_tensor(ITEM, case["outputs"]["out"]).view(case["outputs"]["out"]["shape"])
    tokens, per_frame = len(want), int(want[0].sum())
    q, k = torch.randn(2, 1, tokens, 4)
    weights = frame_causal_attention(q, k, torch.eye(tokens)[None], tokens // per_frame)[0]
    assert_close(ITEM, case["outputs"]["out"], (weights > 0).float())


def model_of(case: dict[str, Any]) -> HunyuanVae:
    tiling = case["tiling"] or {}
    options: dict[str, Any] = {}
    if tiling:
        options = {
            "use_spatial_tiling": tiling["spatial"],
            "use_temporal_tiling": tiling["temporal"],
            "sample_size": tiling["tile_sample_min_size"],
            "sample_tsize": tiling["tile_sample_min_tsize"],
            "tile_overlap_factor": tiling["overlap"],
        }
    model = HunyuanVae(HunyuanVaeConfig(**{**case["config"], **options}))
    for axis, name in ((model.space_tiles, "tile_latent_min_size"), (model.time_tiles, "tile_latent_min_tsize")):
        assert axis is None or axis.latent == tiling[name]
    assert_keys(case["keys"], model)
    fill_by_rule(model)
    return model.eval()


@pytest.mark.parametrize("case", [p for p in cases_of("hunyuan_vae") if whole(p.values[0])])
@torch.no_grad()
def test_small_models(case: dict[str, Any]) -> None:
    model, spec = model_of(case), case["inputs"]["x"]
    assert model.config.scale_factor == case["scale_factor"]
    assert model.config.shift_factor == case["shift_factor"]
    x = make_input(spec)
    posterior = model.posterior(x)
    z_mode = model.encode(x, sample_posterior=False)
    got = {
        "z_mode": z_mode,
        "mean": posterior.mean,
        "logvar": posterior.logvar,
        "z_sampled": model.encode(x, generator=torch.Generator().manual_seed(spec["seed"] + 1)),
        "rec": model.decode(z_mode),
        "kl": posterior.kl(),
    }
    if "encoder_only" in case["outputs"]:
        got["encoder_only"] = model.encoder(x)
    assert set(case["outputs"]) == set(got)
    for name, output in case["outputs"].items():
        assert_close(ITEM, output, got[name])


def test_latent_sizes() -> None:
    config = HunyuanVaeConfig()
    for clip, latent in ITEM["latent_size_table"]:
        assert list(latent_size(config, *clip)) == latent


@lru_cache(maxsize=1)
def full_model() -> HunyuanVae:
    model = HunyuanVae(HunyuanVaeConfig(**{**MANIFEST["config"], "use_spatial_tiling": False}))
    fill_by_rule(model)
    return model.eval()


@pytest.mark.parametrize("case", cases_of("hunyuan_full"))
@torch.no_grad()
def test_full_size(case: dict[str, Any]) -> None:
    model, x = full_model(), make_input(case["inputs"]["x"])
    z_mode = model.encode(x, sample_posterior=False)
    got: dict[str, Tensor] = {"z_mode": z_mode, "logvar": model.posterior(x).logvar, "rec": model.decode(z_mode)}
    for name, output in case["outputs"].items():
        assert_close(FULL, output, got[name])


def test_manifest() -> None:
    with torch.device("meta"):
        model = HunyuanVae(HunyuanVaeConfig(**MANIFEST["config"]))
    assert_keys({key: shape for key, (shape, _) in MANIFEST["state_dict"].items()}, model)
    assert sum(p.numel() for p in model.parameters()) == MANIFEST["total_params"]
    assert not list(model.buffers())
