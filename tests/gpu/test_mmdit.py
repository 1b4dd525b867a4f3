"""The MMDiT at its full width, few blocks deep, on a GPU: half precision and gradient checkpointing.

Shapes: 9 x 16 x 28 image tokens, which is 33 frames of 256 x 448 px, and 512 text tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.mmdit import inputs_for
from torch import Tensor

from osora_cli.config.models.flux import FluxConfig
from osora_cli.model.mmdit import MMDiT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CONFIG = FluxConfig(
    in_channels=64,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    num_heads=24,
    depth=2,
    depth_single_blocks=4,
    axes_dim=[16, 56, 56],
    fused_qkv=False,
    use_liger_rope=True,
    cond_embed=True,
)
GRID = (9, 16, 28)


def build() -> MMDiT:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return MMDiT(CONFIG)


def gpu_inputs() -> dict[str, Tensor]:
    inputs = inputs_for(CONFIG, grid=GRID, num_text=512, batch=1)
    return {name: value.cuda() for name, value in inputs.items()}


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_half_precision_is_near_fp32(record_property: Callable[[str, object], None]) -> None:
    model, inputs = build(), gpu_inputs()
    with torch.no_grad():
        want = model(**inputs)
        with torch.autocast("cuda", torch.bfloat16):
            mixed = relative_l2(model(**inputs), want)
        half = relative_l2(model.bfloat16()(**inputs), want)
    record_property("relative L2 of autocast", mixed)
    record_property("relative L2 of bfloat16", half)
    assert half < 2e-2, f"bfloat16 {half:.2e}, autocast {mixed:.2e}"
    assert mixed < 2e-2, f"bfloat16 {half:.2e}, autocast {mixed:.2e}"


def test_checkpointing_gives_the_same_gradients_in_less_memory(record_property: Callable[[str, object], None]) -> None:
    model, inputs = build(), gpu_inputs()
    peaks: list[int] = []
    grads: list[dict[str, Tensor]] = []
    for enabled in (False, True):
        model.enable_grad_checkpoint(enabled)
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(**inputs).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        grads.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    record_property("peak bytes without and with checkpointing", peaks)
    assert peaks[1] < 0.8 * peaks[0]
    for name, grad in grads[0].items():
        # fp32 attention on a GPU adds up its key gradients in no fixed order.
        assert float((grads[1][name] - grad).abs().max()) <= 1e-5 * float(grad.abs().max()), name
