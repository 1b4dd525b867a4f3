"""The config section of an MMDiT: what it derives, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.mmdit import SMALL

from osora_cli.config.base import Section
from osora_cli.config.load import check
from osora_cli.config.models.flux import FluxConfig, patch_grid
from osora_cli.config.source import read_yaml
from osora_cli.errors import ConfigError

RELEASED: dict[str, Any] = {
    "type": "flux",
    "from_pretrained": None,
    "strict_load": False,
    "guidance_embed": False,
    "fused_qkv": False,
    "use_liger_rope": True,
    "grad_ckpt_settings": (8, 100),
    "in_channels": 64,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10_000,
    "qkv_bias": True,
    "cond_embed": True,
}


class Holder(Section):
    model: FluxConfig


def test_the_released_configuration() -> None:
    config = FluxConfig(**RELEASED)
    assert config.head_dim == 128
    assert config.mlp_dim == 12288
    assert config.latent_channels == 16
    assert config.cond_channels == 68
    high_compression = FluxConfig(**RELEASED | {"in_channels": 128, "patch_size": 1})
    assert high_compression.latent_channels == 128
    assert high_compression.cond_channels == 129
    assert FluxConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "`model.num_heads`: `5` does not divide hidden_size `48`"),
        ({"axes_dim": [4, 6, 4]}, "add up to 14, but a head has 16 channels (hidden_size 48 / num_heads 3)"),
        ({"axes_dim": [5, 5, 6]}, "must be even numbers of at least 2: channels rotate in pairs"),
        ({"axes_dim": [0, 8, 8]}, "must be even numbers of at least 2: channels rotate in pairs"),
        ({"axes_dim": [8, 8]}, "has 2 entries, 3 are needed: frame, row, column"),
        ({"in_channels": 18}, "a patch of `2` x `2` has 4 latent pixels, and in_channels `18` is no multiple of that"),
        ({"mlp_ratio": 0.001}, "`0.001` leaves no channel of hidden_size `48` for the MLPs"),
        ({"grad_ckpt_settings": [3]}, "`model.grad_ckpt_settings"),
        ({"grad_ckpt_settings": [-1, 2]}, "`model.grad_ckpt_settings"),
        ({"depth": -1}, "`model.depth` is `-1`"),
        ({"theta": 0}, "`model.theta` is `0`"),
        ({"use_lige_rope": True}, "did you mean `model.use_liger_rope`?"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    text = "model:\n" + "".join(f"  {key}: {value}\n" for key, value in (SMALL | change).items())
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        check(read_yaml(path, "bad.yaml"), Holder, "`bad.yaml`")
    assert message in str(error.value)
    assert "bad.yaml:" in str(error.value)
    assert error.value.exit_code == 2


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ValueError, match="3 validation errors"):
        FluxConfig(**SMALL | {"num_heads": 5, "patch_size": 3, "mlp_ratio": -1.0})


def test_patch_grid() -> None:
    assert patch_grid((5, 4, 6), 2) == (5, 2, 3)
    with pytest.raises(ConfigError, match="a latent of `5` x `6` cannot be cut into patches of 2 x 2"):
        patch_grid((1, 5, 6), 2)
