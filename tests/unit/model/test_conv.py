"""Gradients of bf16 convolutions over very short clips, where the CPU's own kernel leaves them unset."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from osora_cli.model.conv import Conv3d


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def run(conv: nn.Conv3d, x: Tensor, *, bf16: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the input's gradient, the weight's gradient."""
    conv.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16 == "autocast"):
        out = conv.to(torch.bfloat16)(x.to(torch.bfloat16)) if bf16 == "weights" else conv(x)
    seed = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=seed).to(out.dtype))
    grads = out.detach(), x.grad, conv.weight.grad
    return tuple(t.float() for t in grads)  # type: ignore[return-value, union-attr]


SHAPES = [(3, 1, 1), (3, (1, 2, 2), 1), (5, 1, 2), (4, 1, 1), (3, 2, 1), (3, 1, (0, 1, 1))]
CASES = [(n, *shape) for n in range(1, 6) for shape in SHAPES if n >= 3 or shape[2] in (1, 2)]
CASES.remove((1, 4, 1, 1))  # shorter than the kernel, padding and all


@pytest.mark.parametrize("bf16", ["autocast", "weights"])
@pytest.mark.parametrize(("frames", "kernel", "stride", "padding"), CASES)
def test_bf16_gradients(frames: int, kernel: int, stride: int, padding: int, bf16: str) -> None:
    conv = Conv3d(32, 32, kernel, stride=stride, padding=padding)
    x = torch.randn(2, 32, frames, 5, 6, generator=torch.Generator().manual_seed(0))
    want = run(conv, x, bf16="no")
    for got, exact in zip(run(conv, x, bf16=bf16), want, strict=True):
        assert got.shape == exact.shape
        assert relative(got, exact) < 2e-2


@pytest.mark.parametrize(
    ("groups", "stride", "padding", "bias"), [(1, 1, 1, True), (1, (1, 2, 2), 1, False), (4, 2, 0, True)]
)
def test_one_small_clip_without_gradient_is_that_of_a_batch(
    groups: int, stride: int, padding: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = Conv3d(8, 16, 3, stride=stride, padding=padding, groups=groups, bias=bias)
    x = torch.randn(1, 8, 5, 12, 9, generator=torch.Generator().manual_seed(0))
    taken = []
    onednn = torch.mkldnn_convolution
    monkeypatch.setattr(torch, "mkldnn_convolution", lambda *a: (taken.append(1), onednn(*a))[1])
    for given in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        with torch.no_grad():
            alone, batch = conv(given), conv(torch.cat([given, given]))
        assert torch.allclose(alone, batch[:1], rtol=1e-5, atol=1e-6)
        assert torch.allclose(alone, conv(given), rtol=1e-5, atol=1e-6)  # with a gradient: torch's own choice
    assert len(taken) == 2


def test_a_choice_of_padding_by_name_is_torchs_own() -> None:
    conv = Conv3d(4, 4, 3, padding="same")
    x = torch.randn(1, 4, 5, 6, 6)
    with torch.no_grad():
        assert conv(x).shape == x.shape
