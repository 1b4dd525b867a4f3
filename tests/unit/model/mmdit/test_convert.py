"""Weights moved between layouts: a converted model is the same function."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.mmdit import inputs_for, small_config, small_model
from torch import Tensor

from osora_cli.errors import CheckpointError
from osora_cli.model.build import build_model
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.convert import RopeLayout, convert_rope, convert_state

LAYOUTS = list(product([True, False], repeat=2))


def rope_of(liger: bool) -> RopeLayout:
    return "half" if liger else "interleaved"


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize(("to_fused", "to_liger"), LAYOUTS)
@pytest.mark.parametrize(("from_fused", "from_liger"), LAYOUTS)
def test_converted_model_gives_the_same_output(
    from_fused: bool, from_liger: bool, to_fused: bool, to_liger: bool, qkv_bias: bool
) -> None:
    options: dict[str, Any] = {"qkv_bias": qkv_bias, "cond_embed": True, "guidance_embed": True}
    source = small_model(fused_qkv=from_fused, use_liger_rope=from_liger, **options)
    target = MMDiT(small_config(fused_qkv=to_fused, use_liger_rope=to_liger, **options))
    state = convert_state(source.state_dict(), target.config, rope_of(from_liger))
    target.load_state_dict(state, strict=True)
    inputs = inputs_for(source.config)
    with torch.no_grad():
        want, got = source(**inputs), target(**inputs)
    assert float((got - want).abs().max()) <= 2e-6 * float(want.abs().max()) + 1e-7


@pytest.mark.parametrize("fused", [True, False])
def test_there_and_back_is_bit_equal(fused: bool) -> None:
    model = small_model(fused_qkv=fused)
    state = model.state_dict()
    other = convert_state(state, small_config(fused_qkv=not fused))
    assert set(other) != set(state)
    qkv = convert_state(other, model.config)
    rope = convert_rope(convert_rope(state, model.config, "half", "interleaved"), model.config, "interleaved", "half")
    for back in (qkv, rope):
        assert set(back) == set(state)
        assert all(torch.equal(back[key], value) for key, value in state.items())


def test_wrong_rotary_layout_loads_and_is_wrong() -> None:
    """Why the layout has to be said: nothing but the output shows the mistake."""
    source = small_model(use_liger_rope=False)
    wrong = MMDiT(small_config(use_liger_rope=True))
    wrong.load_state_dict(source.state_dict(), strict=True)
    inputs = inputs_for(source.config)
    with torch.no_grad():
        want, got = source(**inputs), wrong(**inputs)
    assert float((got - want).abs().max()) > 0.003 * float(want.abs().max())


def test_order_of_rows_in_a_fused_projection() -> None:
    model = small_model(fused_qkv=True)
    state, width = model.state_dict(), model.config.hidden_size
    parts = convert_state(state, small_config(fused_qkv=False))
    single, double = state["single_blocks.0.linear1.weight"], state["double_blocks.0.txt_attn.qkv.weight"]
    assert torch.equal(parts["single_blocks.0.q_proj.weight"], single[:width])
    assert torch.equal(parts["single_blocks.0.v_mlp.weight"], single[2 * width :])
    assert torch.equal(parts["double_blocks.0.txt_attn.k_proj.weight"], double[width : 2 * width])


def test_rotary_order_within_a_head() -> None:
    model = small_model(fused_qkv=False)
    state, head = model.state_dict(), model.config.head_dim
    half = convert_rope(state, model.config, "interleaved", "half")
    key = "double_blocks.1.img_attn.q_proj.bias"
    second_head = state[key][head : 2 * head]
    assert torch.equal(half[key][head : 2 * head], torch.cat([second_head[0::2], second_head[1::2]]))
    for unchanged in ("double_blocks.1.img_attn.v_proj.weight", "single_blocks.0.v_mlp.weight", "txt_in.bias"):
        assert torch.equal(half[unchanged], state[unchanged])


def test_keys_of_no_projection_pass_through() -> None:
    state: dict[str, Tensor] = {"img_in.weight": torch.ones(2, 2), "other": torch.ones(1)}
    assert convert_state(state, small_config(), "half").keys() == state.keys()


def test_incomplete_projections_are_all_named() -> None:
    state = small_model(fused_qkv=False).state_dict()
    del state["double_blocks.0.img_attn.k_proj.weight"], state["single_blocks.2.v_mlp.bias"]
    with pytest.raises(CheckpointError, match="4 projections cannot be fused for a hidden_size of 48") as error:
        convert_state(state, small_config(fused_qkv=True))
    assert "`double_blocks.0.img_attn.q_proj.weight` [48, 48]" in str(error.value)
    assert "`single_blocks.2.k_proj.bias` [48]" in str(error.value)


def test_weights_of_another_width_are_refused() -> None:
    state = small_model(fused_qkv=True).state_dict()
    wide = small_config(fused_qkv=False, hidden_size=96, axes_dim=[8, 12, 12])
    with pytest.raises(CheckpointError, match="8 projections cannot be split for a hidden_size of 96"):
        convert_state(state, wide)


# ---- on loading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_file_of_the_other_layout_is_loaded_by_build_model(fused: bool, tmp_path: Path) -> None:
    source = small_model(fused_qkv=fused, qkv_bias=False)
    path = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), path)
    config = small_config(fused_qkv=not fused, qkv_bias=False, cond_embed=True, from_pretrained=str(path))
    model = build_model(config.model_dump())
    assert isinstance(model, MMDiT)
    # A condition embedding that the file does not have is neutral.
    inputs = inputs_for(config)
    with torch.no_grad():
        got = model(**inputs)
        inputs.pop("cond")
        want = source(**inputs)
    assert float((got - want).abs().max()) <= 2e-6 * float(want.abs().max())


def test_a_file_that_cannot_be_brought_into_the_layout_is_reported_key_for_key(tmp_path: Path) -> None:
    state = small_model(fused_qkv=False).state_dict()
    del state["double_blocks.0.img_attn.k_proj.weight"]
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    with pytest.raises(CheckpointError) as error:
        build_model(small_config(fused_qkv=True, from_pretrained=str(path)))
    text = str(error.value)
    assert "1 missing in the file" in text
    assert "double_blocks.0.img_attn.qkv.weight [144, 48]" in text
    assert "2 unknown to the model" in text
    assert "double_blocks.0.img_attn.v_proj.weight [48, 48]" in text
