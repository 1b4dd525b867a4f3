"""Nearest upsampling, convolution of edge 3 and the duplicating shortcut as one convolution of the small input.

Along a doubled axis an output of even index sees inputs h - 1 and h, the latter by two of the three taps, an odd one h
and h + 1: kernels of two taps, whose sums are made from the weights. All phases come from one convolution with two taps
along each doubled axis, 4/9 of the multiplications of a convolution after upsampling (8/27 where time is doubled too),
and the upsampled input is never made. One more pass puts the phases where they belong, with bias and shortcut.

Shape suffixes: B clip, C channels in, O channels out, F phases (time slowest), T frames, H rows, W columns.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton

_TILE = {"BLOCK_P": 16, "BLOCK_C": 128, "num_warps": 4}


def upsample_conv(x_BCTHW: Tensor, weight_OC333: Tensor, bias_O: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """conv(upsample(x)) + bias + x duplicated, in the dtype of x.

    Args:
        x_BCTHW: [B, C, T, H, W].
        weight_OC333: [O, C, 3, 3, 3], of the convolution after nearest upsampling.
        factors: what becomes larger along (T, H, W), each 1 or 2. O * prod(factors) is a multiple of C.

    Returns:
        [B, O, T * ft, H * fh, W * fw].
    """
    x_BCTHW = channels_last(x_BCTHW)
    y_BFoTHW = F.conv3d(x_BCTHW, phase_weights(weight_OC333, factors).to(x_BCTHW.dtype), padding=1)
    return _Assemble.apply(y_BFoTHW, bias_O, x_BCTHW, factors)


def phase_weights(weight_OC333: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """[F * O, C, 3 or 2 for each axis]: for each phase the taps by which it sees the small input. Sums are fp32."""
    out_channels, in_channels = weight_OC333.shape[:2]
    weight = weight_OC333.float()
    for axis, factor in zip((4, 3, 2), reversed(factors), strict=True):
        if factor == 2:
            first, middle, last = weight.unbind(axis - 5)
            even = torch.stack([first, middle + last], axis - 5)
            odd = torch.stack([first + middle, last], axis - 5)
            weight = torch.stack([even, odd])
    kernel = [2 if factor == 2 else 3 for factor in factors]
    return weight.reshape(prod(factors) * out_channels, in_channels, *kernel)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BFoTHW: Tensor, bias_O: Tensor, x_BCTHW: Tensor, factors: tuple[int, int, int]) -> Tensor:
        y_BFoTHW = channels_last(y_BFoTHW)
        batch, in_channels, *size = x_BCTHW.shape
        phases = prod(factors)
        channels = y_BFoTHW.shape[1] // phases
        out_size = torch.Size([batch, channels, *(n * f for n, f in zip(size, factors, strict=True))])
        out_BOTHW = _empty(out_size, x_BCTHW)
        launch(
            _assemble, _grid(batch * prod(size), channels),
            y_BFoTHW, bias_O, x_BCTHW, out_BOTHW, batch * prod(size), *size, channels, in_channels,
            channels * phases // in_channels, FT=factors[0], FH=factors[1], FW=factors[2], **_TILE,
        )  # fmt: skip
        ctx.factors, ctx.sizes = factors, (y_BFoTHW.shape, x_BCTHW.shape)
        return out_BOTHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BOTHW: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_BOTHW = channels_last(grad_BOTHW)
        y_size, x_size = ctx.sizes
        batch, in_channels, *size = x_size
        phases, channels = prod(ctx.factors), grad_BOTHW.shape[1]
        grad_y, grad_x = _empty(y_size, grad_BOTHW), _empty(x_size, grad_BOTHW)
        factors = dict(zip(("FT", "FH", "FW"), ctx.factors, strict=True))
        launch(
            _take_apart,
            _grid(batch * prod(y_size[2:]), channels),
            grad_BOTHW,
            grad_y,
            batch * prod(y_size[2:]),
            *size,
            channels,
            **factors,
            **_TILE,
        )
        launch(
            _gather, _grid(batch * prod(size), in_channels),
            grad_BOTHW, grad_x, batch * prod(size), *size, channels, in_channels,
            GROUP=channels * phases // in_channels, **factors, **_TILE,
        )  # fmt: skip
        grad_bias = grad_BOTHW.sum((0, 2, 3, 4), dtype=torch.float32)
        return grad_y, grad_bias, grad_x, None


def _empty(size: torch.Size, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d)


def _grid(pixels: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(pixels, _TILE["BLOCK_P"]), triton.cdiv(channels, _TILE["BLOCK_C"])


@triton.jit
def _place(p, frames, rows, columns):
    """Clip, frame, row and column of the pixels p, as int64."""
    w = p % columns
    h = p // columns % rows
    t = p // (columns * rows) % frames
    return p // (columns * rows * frames), t, h, w


@triton.jit
def _assemble(
    y_ptr, bias_ptr, x_ptr, out_ptr, count, frames, rows, columns, channels, in_channels, group,
    FT: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (p < count)[:, None] & (c < channels)[None, :]
    b, t, h, w = _place(p, frames, rows, columns)
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    # The convolution gave one frame, row or column more along each doubled axis.
    y_frames, y_rows, y_columns = frames + FT - 1, rows + FH - 1, columns + FW - 1
    for phase in tl.static_range(FT * FH * FW):
        dt, dh, dw = phase // (FH * FW), phase // FW % FH, phase % FW
        y_at = ((b * y_frames + t + dt) * y_rows + h + dh) * y_columns + w + dw
        y_at = y_at[:, None] * (FT * FH * FW * channels) + phase * channels + c[None, :]
        source = (c * (FT * FH * FW) + phase) // group
        value = tl.load(y_ptr + y_at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        value += tl.load(x_ptr + p[:, None] * in_channels + source[None, :], mask=inside, other=0.0).to(tl.float32)
        out_at = ((b * frames * FT + t * FT + dt) * rows * FH + h * FH + dh) * columns * FW + w * FW + dw
        tl.store(out_ptr + out_at[:, None] * channels + c[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _take_apart(
    grad_ptr, out_ptr, count, frames, rows, columns, channels,
    FT: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of what the convolution gave: 0 where no output was taken from it."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (p < count)[:, None] & (c < channels)[None, :]
    b, t, h, w = _place(p, frames + FT - 1, rows + FH - 1, columns + FW - 1)
    for phase in tl.static_range(FT * FH * FW):
        dt, dh, dw = phase // (FH * FW), phase // FW % FH, phase % FW
        taken = (t >= dt) & (t - dt < frames) & (h >= dh) & (h - dh < rows) & (w >= dw) & (w - dw < columns)
        at = ((b * frames + t - dt) * FT + dt) * rows * FH + (h - dh) * FH + dh
        at = at * columns * FW + (w - dw) * FW + dw
        value = tl.load(grad_ptr + at[:, None] * channels + c[None, :], mask=inside & taken[:, None], other=0.0)
        tl.store(out_ptr + p[:, None] * (FT * FH * FW * channels) + phase * channels + c[None, :], value, mask=inside)


@triton.jit
def _gather(
    grad_ptr, out_ptr, count, frames, rows, columns, channels, in_channels,
    GROUP: tl.constexpr, FT: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The shortcut's gradient: the sum over the outputs that hold a copy of an input."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (p < count)[:, None] & (c < in_channels)[None, :]
    b, t, h, w = _place(p, frames, rows, columns)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for copy in tl.static_range(GROUP):
        folded = c * GROUP + copy
        phase = folded % (FT * FH * FW)
        dt, dh, dw = phase // (FH * FW), phase // FW % FH, phase % FW
        at = (((b * frames + t) * FT)[:, None] + dt[None, :]) * rows * FH + (h * FH)[:, None] + dh[None, :]
        at = at * columns * FW + (w * FW)[:, None] + dw[None, :]
        at = at * channels + (folded // (FT * FH * FW))[None, :]
        total += tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + p[:, None] * in_channels + c[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)
