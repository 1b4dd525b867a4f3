"""The networks on CUDA: bf16 against fp32, with autocast's own error beside it."""

from __future__ import annotations

import pytest
import torch
from support.golden import fill_by_rule
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.flux import FluxConfig
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.mmdit.model import MMDiT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want).norm() / want.norm())


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


@torch.no_grad()
def test_dc_ae_f32t4c128() -> None:
    model = DcAe(DcAeConfig(model_name="dc-ae-f32t4c128"))
    fill_by_rule(model)
    model.cuda().eval()
    x = randn(1, 3, 16, 256, 256).clamp(-1, 1)
    rec, _, z = model(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        by_autocast = model(x)
    model.bfloat16()
    by_bf16 = model(x.bfloat16())
    for name, i, want in (("z", 2, z), ("rec", 0, rec)):
        got = distance(by_bf16[i], want)
        print(f"dc_ae {name}: bf16 {got:.2e}, autocast {distance(by_autocast[i], want):.2e}")
        assert got < 2e-2


@torch.no_grad()
def test_flux_at_full_width() -> None:
    config = FluxConfig.model_validate(
        {
            "type": "flux", "in_channels": 64, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072,
            "mlp_ratio": 4.0, "num_heads": 24, "depth": 2, "depth_single_blocks": 4, "axes_dim": [16, 56, 56],
            "theta": 10000, "qkv_bias": True, "guidance_embed": False, "fused_qkv": False, "use_liger_rope": True,
        }
    )  # fmt: skip
    model = MMDiT(config)
    fill_by_rule(model)
    model.cuda().eval()
    t, h, w, text = 5, 16, 16, 128
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in (t, h, w)), indexing="ij"), -1).reshape(1, -1, 3)
    inputs = {
        "img": randn(1, t * h * w, 64),
        "img_ids": grid.float().cuda(),
        "txt": randn(1, text, 4096, seed=1),
        "txt_ids": torch.zeros(1, text, 3).cuda(),
        "timesteps": torch.tensor([0.4]).cuda(),
        "y_vec": randn(1, 768, seed=2),
    }
    want = model(**inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        by_autocast = model(**inputs)
    model.bfloat16()
    low = {k: v if k in ("img_ids", "txt_ids", "timesteps") else v.bfloat16() for k, v in inputs.items()}
    got = distance(model(**low), want)
    print(f"flux: bf16 {got:.2e}, autocast {distance(by_autocast, want):.2e}")
    assert got < 2e-2
