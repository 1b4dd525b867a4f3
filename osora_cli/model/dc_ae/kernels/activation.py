"""SiLU after a bias, and the gate of a gated convolution, one pass forth and one back.

Shape suffixes: P pixels (B, T, H, W in a row), C channels, S partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton

_PROGRAMS = 1056
_TILE = {"BLOCK_P": 32, "BLOCK_C": 128, "num_warps": 4}


def bias_silu(x: Tensor, bias_C: Tensor) -> Tensor:
    """silu(x + bias), without a rounding between the two; [B, C, T, H, W] in, the same out."""
    return _BiasSilu.apply(x, bias_C)


def silu_gate(x: Tensor) -> Tensor:
    """First half of the channels times silu of the second; [B, 2 C, T, H, W] -> [B, C, T, H, W]."""
    return _SiluGate.apply(x)


class _BiasSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_C: Tensor) -> Tensor:
        x = channels_last(x)
        y = torch.empty_like(x)
        channels = x.shape[1]
        pixels = x.numel() // channels
        launch(_bias_silu, _tiles(pixels, channels), x, bias_C, y, pixels, channels, **_TILE)
        ctx.save_for_backward(x, bias_C)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, bias_C = ctx.saved_tensors
        grad = channels_last(grad)
        grad_x = torch.empty_like(x)
        channels = x.shape[1]
        pixels = x.numel() // channels
        tiles, columns = _tiles(pixels, channels)
        programs = max(1, min(_PROGRAMS // columns, tiles))
        part_SC = torch.empty(programs, channels, dtype=torch.float32, device=x.device)
        launch(_bias_silu_backward, (programs, columns), x, bias_C, grad, grad_x, part_SC, pixels, channels, **_TILE)
        return grad_x, part_SC.sum(0).to(bias_C.dtype)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = channels_last(x)
        channels = x.shape[1] // 2
        y = torch.empty(
            (x.shape[0], channels, *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d
        )
        pixels = y.numel() // channels
        launch(_gate, _tiles(pixels, channels), x, y, pixels, channels, **_TILE)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = channels_last(grad)
        grad_x = torch.empty_like(x)
        channels = x.shape[1] // 2
        pixels = grad.numel() // channels
        launch(_gate_backward, _tiles(pixels, channels), x, grad, grad_x, pixels, channels, **_TILE)
        return grad_x


def _tiles(pixels: int, channels: int) -> tuple[int, int]:
    """Programs along pixels and along channels."""
    return triton.cdiv(pixels, _TILE["BLOCK_P"]), triton.cdiv(channels, _TILE["BLOCK_C"])


@triton.jit
def _tile(pixels, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's pixels and channels, and which of them there are."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return p, c, (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def _bias_silu(x_ptr, bias_ptr, y_ptr, pixels, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    p, c, inside = _tile(pixels, channels, BLOCK_P, BLOCK_C)
    at = p[:, None] * channels + c[None, :]
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    tl.store(y_ptr + at, (x * tl.sigmoid(x)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bias_silu_backward(
    x_ptr, bias_ptr, grad_ptr, out_ptr, part_ptr, pixels, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(pixels, BLOCK_P), tl.num_programs(0)):
        p = tile * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
        inside = (p < pixels)[:, None] & (c < channels)[None, :]
        at = p[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(x)
        grad = grad * gate * (1.0 + x * (1.0 - gate))
        total += grad
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(part_ptr + tl.program_id(0) * channels + c, tl.sum(total, 0), mask=c < channels)


@triton.jit
def _gate(x_ptr, y_ptr, pixels, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    p, c, inside = _tile(pixels, channels, BLOCK_P, BLOCK_C)
    at = p[:, None] * 2 * channels + c[None, :]
    value = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + channels, mask=inside, other=0.0).to(tl.float32)
    y = (value * gate * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + p[:, None] * channels + c[None, :], y, mask=inside)


@triton.jit
def _gate_backward(x_ptr, grad_ptr, out_ptr, pixels, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    p, c, inside = _tile(pixels, channels, BLOCK_P, BLOCK_C)
    at = p[:, None] * 2 * channels + c[None, :]
    value = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + channels, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + p[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    element = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (grad * gate * open_).to(element), mask=inside)
    slope = open_ * (1.0 + gate * (1.0 - open_))
    tl.store(out_ptr + at + channels, (grad * value * slope).to(element), mask=inside)
