"""Diffusion training from released weights: files with the key names of Open-Sora 2.0 and of FLUX.1, at small width."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.golden import load_json
from support.mmdit import inputs_for, small_config, small_model
from support.tiny_diffusion import CONFIG
from torch import Tensor

from osora_cli.app.diffusion.start import build_mmdit, check_model_start
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.errors import CheckpointError, ConfigError
from osora_cli.model.mmdit import MMDiT

CPU = torch.device("cpu")
RELEASED = {"fused_qkv": False, "use_liger_rope": True}
# FLUX.1-dev's names for what differs from the video model.
FLUX_NAMES = (
    r"(img|txt|cond)_in|(time|vector|guidance)_in\.(in|out)_layer|double_blocks\.\d+\.(img|txt)_(mod\.lin|attn\.qkv|"
    r"attn\.proj|mlp\.[02])|single_blocks\.\d+\.(linear1|linear2|modulation\.lin)|final_layer\.(linear|adaLN_modulation\.1)"
)


def config_for(path: Path, **model: Any) -> TrainDiffusionConfig:
    section = small_config(**model).model_dump() | {"from_pretrained": str(path)}
    return TrainDiffusionConfig.model_validate({**CONFIG, "model": section, "t5": {**CONFIG["t5"], "width": 12},
                                                "clip": {**CONFIG["clip"], "width": 10}})  # fmt: skip


def saved(folder: Path, state: dict[str, Tensor]) -> Path:
    path = folder / "weights.safetensors"
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    return path


def started(config: TrainDiffusionConfig) -> tuple[MMDiT, list[str]]:
    notes: list[str] = []
    start = check_model_start(config, notes)
    return build_mmdit(config, start, CPU, notes), notes


def same_output(source: MMDiT, model: MMDiT, tolerance: float) -> None:
    inputs = inputs_for(model.config)
    with torch.no_grad():
        got = model(**inputs)
        want = source(**{k: v for k, v in inputs.items() if k != "cond" or source.config.cond_embed})
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


def test_open_sora_v2_with_its_own_keys_starts_an_i2v_training(tmp_path: Path) -> None:
    """Open_Sora_v2.safetensors: 1082 keys, 19 + 38 blocks, split projections, half rope, with cond_in."""
    depth = {"depth": 19, "depth_single_blocks": 38}
    source = small_model(**RELEASED, **depth, cond_embed=True)
    state = source.state_dict()
    assert set(state) == set(load_json("manifests/mmdit_stage1_i2v")["state_dict"])
    model, notes = started(config_for(saved(tmp_path, state), **RELEASED, **depth, cond_embed=True))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert notes == [f"starting from the weights in {tmp_path / 'weights.safetensors'}"]


def test_a_t2v_file_gains_a_condition_that_starts_at_zero(tmp_path: Path) -> None:
    source = small_model(**RELEASED)
    assert "cond_in.weight" not in source.state_dict()
    model, notes = started(config_for(saved(tmp_path, source.state_dict()), **RELEASED, cond_embed=True))
    assert not bool(model.cond_in.weight.any())
    assert not bool(model.cond_in.bias.any())
    same_output(source, model, 0.0)
    assert any("cond_in.weight, cond_in.bias are not in the weights and start at zero" in note for note in notes)
    # It learns all the same: the gradient of a zero layer is not zero.
    model(**inputs_for(model.config)).square().mean().backward()
    assert model.cond_in.weight.grad is not None
    assert bool(model.cond_in.weight.grad.any())


@pytest.mark.parametrize("cond_embed", [False, True])
def test_a_fused_flux_file_starts_a_video_model(tmp_path: Path, cond_embed: bool) -> None:
    source = small_model(fused_qkv=True, use_liger_rope=False, guidance_embed=True)
    state = source.state_dict()
    for key in state:
        assert re.fullmatch(rf"({FLUX_NAMES})\.(weight|bias)|.*norm\.(query|key)_norm\.scale", key), key
    path = saved(tmp_path, state)
    wanted: dict[str, Any] = {**RELEASED, "guidance_embed": True, "cond_embed": cond_embed}
    with pytest.raises(ConfigError, match="which channels of a head rotate together cannot be seen") as caught:
        started(config_for(path, **wanted))
    assert caught.value.hint == "--model.pretrained-rope interleaved"
    model, _ = started(config_for(path, **wanted, pretrained_rope="interleaved"))
    same_output(source, model, 2e-6)
    # Said wrongly it loads as well, and is another function.
    wrong, _ = started(config_for(path, **wanted, pretrained_rope="half"))
    with pytest.raises(AssertionError):
        same_output(source, wrong, 1e-3)


def test_weights_that_lack_something(tmp_path: Path) -> None:
    state = small_model(**RELEASED).state_dict()
    del state["final_layer.linear.bias"]
    path = saved(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"final_layer\.linear\.bias"):
        started(config_for(path, **RELEASED))
    # The presets have the reference's `strict_load: false`: then it is said, key for key.
    model, notes = started(config_for(path, **RELEASED, strict_load=False))
    assert torch.equal(model.img_in.weight, state["img_in.weight"])
    assert any("final_layer.linear.bias" in note and "starts from random values" in note for note in notes)
    with pytest.raises(CheckpointError, match="not those of this model"):
        started(config_for(saved(tmp_path, {"other": torch.zeros(3)}), **RELEASED, strict_load=False))


def test_recomputed_blocks_are_those_of_either_key() -> None:
    def recomputed(**changes: Any) -> list[bool]:
        config = TrainDiffusionConfig.model_validate({**CONFIG, "grad_checkpoint": True, **changes})
        model = build_mmdit(config, None, CPU, [])
        return [bool(block.recompute) for block in (*model.double_blocks, *model.single_blocks)]

    section = CONFIG["model"]
    assert recomputed() == [True, True, True]
    assert recomputed(grad_ckpt_settings=[0, 1]) == [False, True, False]
    assert recomputed(grad_ckpt_settings=[0, 1], model={**section, "grad_ckpt_settings": [1, 0]}) == [
        True,
        False,
        False,
    ]
    assert recomputed(grad_checkpoint=False) == [False, False, False]
