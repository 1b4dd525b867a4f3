"""Token inputs of the golden training steps: packed latents, packed conditions and position ids.

The autoencoder of these cases is a rule stated in the item: channel c of a latent is (c + 1) times the mean over a
block of pixels, in the last frame of each group or the clip's last.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.golden import assert_close, cases_of, golden_tensor, load_item, make_input
from torch import Tensor

from osora_cli.config.models.flux import Grid, patch_grid
from osora_cli.model.mmdit.packing import image_ids, pack, pack_condition, text_ids, unpack

ITEM = "train_math"
PREPARED = [case for case in cases_of(ITEM) if "img_ids" in case.values[0].get("outputs", {})]


def latent_of(case: dict[str, Any]) -> Tensor:
    cached = case["inputs"].get("cached")
    if cached:
        return make_input(cached["video_latents"])
    dtype = getattr(torch, case["dtype_run"].removeprefix("torch."))
    video_BCTHW = make_input(case["inputs"]["video"]).to(dtype)
    stub = case["stub_ae"]
    assert "at frame min(t*r, T-1)" in stub["rule"], "the stub is another than this test knows"
    ratio, block = stub["time_ratio"], stub["spatial"]
    length = video_BCTHW.shape[2]
    frames = [min(t * ratio, length - 1) for t in range((length - 1) // ratio + 1)]
    cells = video_BCTHW[:, :, frames].unflatten(4, (-1, block)).unflatten(3, (-1, block))
    # Two means, as the rule has it: in half precision each of them rounds.
    mean_B1THW = cells.mean(dim=1, keepdim=True).mean(dim=(4, 6))
    factor = torch.arange(1, stub["latent_channels"] + 1, dtype=dtype).view(1, -1, 1, 1, 1)
    return mean_B1THW * factor


def grid_of(case: dict[str, Any]) -> Grid:
    size = latent_of(case).shape[2:]
    return patch_grid((size[0], size[1], size[2]), case["config"]["patch_size"])


@pytest.mark.parametrize("case", PREPARED)
def test_latent_tokens_and_ids(case: dict[str, Any]) -> None:
    meta, _ = load_item(ITEM)
    outputs, patch = case["outputs"], case["config"]["patch_size"]
    batch, grid = outputs["img"]["shape"][0], grid_of(case)
    assert_close(meta, outputs["x_0"], pack(latent_of(case), patch))
    assert_close(meta, outputs["img_ids"], image_ids(grid, batch))
    assert_close(meta, outputs["txt_ids"], text_ids(outputs["txt"]["shape"][1], batch))


@pytest.mark.parametrize("case", [case for case in PREPARED if "cond" in case.values[0]["outputs"]])
def test_condition_tokens_are_the_mask_and_the_masked_latent(case: dict[str, Any]) -> None:
    meta, _ = load_item(ITEM)
    output, patch = case["outputs"]["cond"], case["config"]["patch_size"]
    assert output["stride"] == 1
    golden = golden_tensor(meta, output).view(output["shape"])
    plane = unpack(golden, grid_of(case), patch)
    mask, latent = plane[:, :1], plane[:, 1:]
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    outside = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_condition(mask, latent + (1 - mask) * outside, patch), golden)


def test_every_kind_of_step_is_there() -> None:
    """Both patch sizes, conditions, half precision and cached latents: the item would prove little without them."""
    cases = [case.values[0] for case in PREPARED]
    assert {case["config"]["patch_size"] for case in cases} >= {1, 2}
    assert any("cond" in case["outputs"] for case in cases)
    assert any(re.search("bfloat16", case["dtype_run"]) for case in cases)
    assert any(case["inputs"].get("cached") for case in cases)
