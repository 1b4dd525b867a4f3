"""Operations with a backward pass of their own, against what autograd makes of the plain formula, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from osora_cli.model.dc_ae.layers import (
    SPACE,
    SPACE_TIME,
    Conv3d,
    Factors,
    add_duplicated,
    average_shortcut,
    upsample,
)
from osora_cli.model.dc_ae.ops import depthwise_conv, rms_norm

LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]


def draw(*shape: int, layout: torch.memory_format = torch.contiguous_format, seed: int = 0) -> Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return value.contiguous(memory_format=layout).requires_grad_()


def check_equal(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    got, want = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for ours_grad, plain_grad in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours_grad, plain_grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rms_norm(layout: torch.memory_format) -> None:
    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return normed * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1)

    x = draw(2, 6, 3, 4, 5, layout=layout)
    check_equal(lambda *t: rms_norm(*t, eps=1e-5), plain, x, draw(6, seed=1), draw(6, seed=2))


def test_rms_norm_of_nothing_has_a_finite_gradient() -> None:
    x = torch.zeros(1, 4, 1, 2, 2, requires_grad=True)
    rms_norm(x, torch.ones(4), torch.zeros(4), 1e-5).sum().backward()
    assert bool(torch.isfinite(x.grad).all())  # type: ignore[arg-type]


def test_rms_norm_divides_in_fp32() -> None:
    x = (torch.randn(1, 64, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 30).to(torch.bfloat16)
    weight, bias = torch.rand(64).to(torch.bfloat16), torch.rand(64).to(torch.bfloat16)
    wide = x.float()
    normed = (wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt()).to(torch.bfloat16)
    want = torch.addcmul(bias.view(-1, 1, 1, 1), normed, weight.view(-1, 1, 1, 1))
    got = rms_norm(x, weight, bias, 1e-5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_depthwise_conv(frames: int, kernel: int, layout: torch.memory_format) -> None:
    x = draw(2, 6, frames, 4, 5, layout=layout)
    weight = draw(6, 1, kernel, kernel, kernel, seed=1)
    check_equal(
        depthwise_conv,
        lambda x, w, b: F.conv3d(x, w, b, padding=kernel // 2, groups=6),
        x,
        weight,
        draw(6, seed=2),
    )
    check_equal(
        lambda x, w: depthwise_conv(x, w, None), lambda x, w: F.conv3d(x, w, padding=kernel // 2, groups=6), x, weight
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "bias"), [(1, True), (1, False), (3, False), (3, True)])
def test_pointwise_conv(groups: int, bias: bool, layout: torch.memory_format) -> None:
    conv = Conv3d(6, 9, 1, groups=groups, bias=bias).double()
    inputs = [draw(2, 6, 2, 3, 4, layout=layout), *conv.parameters()]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv3d(x, weight, bias, groups=groups)

    check_equal(lambda x, *_: conv(x), plain, *inputs)


def unshuffled(x: Tensor, factors: Factors) -> Tensor:
    """Blocks into channels by the definition: channel c * |block| + (time, row, column) offset."""
    t, h, w = factors
    parts = [x[:, :, i::t, j::h, k::w] for i in range(t) for j in range(h) for k in range(w)]
    return torch.stack(parts, dim=2).flatten(1, 2)


# Of 12 channels; others do not divide, and a config with them is refused.
AVERAGED = [(SPACE, n) for n in (48, 24, 12, 6, 4, 3)] + [(SPACE_TIME, n) for n in (96, 48, 24, 12, 4)]
AVERAGED += [((1, 1, 1), n) for n in (12, 6, 4, 3)]
DUPLICATED = [(SPACE, n) for n in (3, 6, 9, 12, 24)] + [(SPACE_TIME, n) for n in (3, 6, 12, 24)]
DUPLICATED += [((1, 1, 1), n) for n in (12, 24, 36)]


@pytest.mark.parametrize(("factors", "out_channels"), AVERAGED)
def test_average_shortcut(factors: Factors, out_channels: int) -> None:
    x = draw(2, 12, 4, 6, 2, layout=torch.channels_last_3d)

    def plain(x: Tensor) -> Tensor:
        folded = unshuffled(x, factors)
        return folded.unflatten(1, (out_channels, -1)).mean(2)

    check_equal(lambda x: average_shortcut(x, out_channels, factors), plain, x)


@pytest.mark.parametrize(("factors", "out_channels"), DUPLICATED)
def test_duplicating_shortcut(factors: Factors, out_channels: int) -> None:
    size = [s * f for s, f in zip((2, 3, 1), factors, strict=True)]
    y = draw(2, out_channels, *size, layout=torch.channels_last_3d, seed=1)
    block = factors[0] * factors[1] * factors[2]
    x = draw(2, 12, 2, 3, 1)

    def plain(y: Tensor, x: Tensor) -> Tensor:
        channels = x.repeat_interleave(out_channels * block // 12, dim=1).unflatten(1, (out_channels, block))
        out = torch.zeros_like(y)
        t, h, w = factors
        for n in range(block):
            out[:, :, n // (h * w) :: t, n // w % h :: h, n % w :: w] = channels[:, :, n]
        return y + out

    check_equal(lambda y, x: add_duplicated(y, x, factors), plain, y, x)


@pytest.mark.parametrize("factors", [SPACE, SPACE_TIME, (1, 1, 1)])
def test_upsample(factors: Factors) -> None:
    def plain(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=tuple(float(f) for f in factors), mode="nearest")

    check_equal(lambda x: upsample(x, factors), plain, draw(2, 5, 2, 3, 4))


def test_activations_stay_channels_last() -> None:
    """Also with one clip or one frame, where a stride is free and a wrong one makes convolutions convert."""
    for shape in ((1, 8, 4, 6, 2), (2, 8, 1, 2, 2), (1, 8, 1, 2, 2)):
        x = draw(*shape, layout=torch.channels_last_3d).float()
        y = torch.zeros(shape[0], 4, shape[2], shape[3] * 2, shape[4] * 2).contiguous(
            memory_format=torch.channels_last_3d
        )
        for out in (add_duplicated(y, x, SPACE), upsample(x, SPACE), average_shortcut(x, 8, SPACE)):
            fresh = torch.empty(out.shape, memory_format=torch.channels_last_3d)
            assert out.stride() == fresh.stride()
