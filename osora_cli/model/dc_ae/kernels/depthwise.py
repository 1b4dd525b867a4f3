"""Depthwise convolution in three dimensions, stride 1, zeros around, in channels_last_3d.

The work is memory traffic: x is read once from memory and its taps come from the first-level cache. cuDNN has no
kernel for it in this layout, and torch's own takes the contiguous one only. Shape suffixes: B clip, C channels,
T frames, H rows, W columns, P pixels of a frame (H * W), K taps (k^3, columns fastest).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last


def depthwise_conv(x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
    """Each channel convolved with its own kernel of edge 3 or 5; output and gradients in the dtype of x."""
    return _DepthwiseConv.apply(x_BCTHW, weight_C1KKK, bias_C)


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
        x_BCTHW = channels_last(x_BCTHW)
        ctx.save_for_backward(x_BCTHW, weight_C1KKK)
        return _convolve(x_BCTHW, weight_C1KKK, bias_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCTHW: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_BCTHW, weight_C1KKK = ctx.saved_tensors
        grad_BCTHW = channels_last(grad_BCTHW)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = _convolve(grad_BCTHW, weight_C1KKK.flip(2, 3, 4), None) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight or needs_bias:
            grad_weight, grad_bias = _weight_gradient(x_BCTHW, grad_BCTHW, weight_C1KKK)
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None


def _convolve(x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
    batch, channels, frames, rows, columns = x_BCTHW.shape
    edge = weight_C1KKK.shape[2]
    weight_KC = weight_C1KKK.reshape(channels, -1).t().contiguous()
    y_BCTHW = torch.empty_like(x_BCTHW)
    block_p, block_c, warps = FORWARD[edge]

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(rows * columns, meta["BLOCK_P"]), triton.cdiv(channels, meta["BLOCK_C"]), batch * frames

    _forward[grid](
        x_BCTHW, weight_KC, bias_C if bias_C is not None else weight_KC, y_BCTHW,
        frames, rows, columns, channels,
        EDGE=edge, BIAS=bias_C is not None, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return y_BCTHW


def _weight_gradient(x_BCTHW: Tensor, grad_BCTHW: Tensor, weight_C1KKK: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, frames, rows, columns = x_BCTHW.shape
    edge = weight_C1KKK.shape[2]
    block_p, block_c, warps, splits = BACKWARD[edge]
    splits = min(splits, batch * frames * triton.cdiv(rows * columns, block_p))
    # A row of taps more holds the sums of the gradient: the bias's.
    part_SKC = torch.empty(splits, edge**3 + 1, channels, dtype=torch.float32, device=x_BCTHW.device)
    grid = (triton.cdiv(channels, block_c), edge * edge if edge == 5 else edge, splits)
    kernel = _weight_5 if edge == 5 else _weight_3
    kernel[grid](
        x_BCTHW, grad_BCTHW, part_SKC, batch, frames, rows, columns, channels, splits,
        BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    sum_KC = part_SKC.sum(0)
    grad_weight = sum_KC[:-1].t().reshape(weight_C1KKK.shape).to(weight_C1KKK.dtype)
    return grad_weight, sum_KC[-1].to(weight_C1KKK.dtype)


# Sizes of a program's tile by the kernel's edge: pixels, channels, warps (and parts of the sum).
FORWARD = {3: (64, 64, 4), 5: (64, 64, 4)}
BACKWARD = {3: (32, 64, 4, 32), 5: (32, 64, 4, 16)}


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, frames, rows, columns, channels,
    EDGE: tl.constexpr, BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = EDGE // 2
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    frame = tl.program_id(2).to(tl.int64)
    t = tl.program_id(2) % frames
    h = p // columns
    w = p % columns
    pixels = rows * columns
    inside_c = c < channels
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    for kt in tl.static_range(EDGE):
        if (t + kt - HALF >= 0) & (t + kt - HALF < frames):
            base = x_ptr + (frame + kt - HALF) * pixels * channels
            for kh in tl.static_range(EDGE):
                in_row = (h + kh - HALF >= 0) & (h + kh - HALF < rows) & (p < pixels)
                for kw in tl.static_range(EDGE):
                    valid = in_row & (w + kw - HALF >= 0) & (w + kw - HALF < columns)
                    at = (p + (kh - HALF) * columns + kw - HALF)[:, None] * channels + c[None, :]
                    x = tl.load(base + at, mask=valid[:, None] & inside_c[None, :], other=0.0)
                    tap = tl.load(weight_ptr + ((kt * EDGE + kh) * EDGE + kw) * channels + c, mask=inside_c, other=0.0)
                    total += x.to(tl.float32) * tap.to(tl.float32)[None, :]
    out = y_ptr + frame * pixels * channels + p[:, None] * channels + c[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(p < pixels)[:, None] & inside_c[None, :])


@triton.jit
def _tap(base, p, h, w, c, inside_c, rows, columns, channels, dh: tl.constexpr, dw: tl.constexpr):
    """x at an offset of (dh, dw) from the pixels p, 0 outside the frame, in fp32."""
    valid = (h + dh >= 0) & (h + dh < rows) & (w + dw >= 0) & (w + dw < columns)
    at = (p + dh * columns + dw)[:, None] * channels + c[None, :]
    return tl.load(base + at, mask=valid[:, None] & inside_c[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weight_3(
    x_ptr, grad_ptr, part_ptr, batch, frames, rows, columns, channels, splits,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The nine taps of one offset in time over a part of the pixels."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    kt = tl.program_id(1)
    split = tl.program_id(2)
    inside_c = c < channels
    pixels = rows * columns
    tiles = tl.cdiv(pixels, BLOCK_P)
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    a00, a01, a02, a10, a11, a12, a20, a21, a22 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    bias = zero
    for tile in range(split, batch * frames * tiles, splits):
        frame = tile // tiles
        t = frame % frames
        p = (tile % tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
        at = frame.to(tl.int64) * pixels * channels + p[:, None] * channels + c[None, :]
        grad = tl.load(grad_ptr + at, mask=(p < pixels)[:, None] & inside_c[None, :], other=0.0).to(tl.float32)
        bias += grad
        if (t + kt >= 1) & (t + kt - 1 < frames):
            h = p // columns
            w = p % columns
            base = x_ptr + (frame + kt - 1).to(tl.int64) * pixels * channels
            a00 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, -1, -1)
            a01 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, -1, 0)
            a02 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, -1, 1)
            a10 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 0, -1)
            a11 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 0, 0)
            a12 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 0, 1)
            a20 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 1, -1)
            a21 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 1, 0)
            a22 += grad * _tap(base, p, h, w, c, inside_c, rows, columns, channels, 1, 1)
    out = part_ptr + split.to(tl.int64) * 28 * channels + c
    first = out + kt * 9 * channels
    tl.store(first, tl.sum(a00, 0), mask=inside_c)
    tl.store(first + channels, tl.sum(a01, 0), mask=inside_c)
    tl.store(first + 2 * channels, tl.sum(a02, 0), mask=inside_c)
    tl.store(first + 3 * channels, tl.sum(a10, 0), mask=inside_c)
    tl.store(first + 4 * channels, tl.sum(a11, 0), mask=inside_c)
    tl.store(first + 5 * channels, tl.sum(a12, 0), mask=inside_c)
    tl.store(first + 6 * channels, tl.sum(a20, 0), mask=inside_c)
    tl.store(first + 7 * channels, tl.sum(a21, 0), mask=inside_c)
    tl.store(first + 8 * channels, tl.sum(a22, 0), mask=inside_c)
    if kt == 0:
        tl.store(out + 27 * channels, tl.sum(bias, 0), mask=inside_c)


@triton.jit
def _weight_5(
    x_ptr, grad_ptr, part_ptr, batch, frames, rows, columns, channels, splits,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The five taps of one offset in time and rows over a part of the pixels."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    kt = tl.program_id(1) // 5
    kh = tl.program_id(1) % 5
    split = tl.program_id(2)
    inside_c = c < channels
    pixels = rows * columns
    tiles = tl.cdiv(pixels, BLOCK_P)
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    a0, a1, a2, a3, a4 = zero, zero, zero, zero, zero
    bias = zero
    for tile in range(split, batch * frames * tiles, splits):
        frame = tile // tiles
        t = frame % frames
        p = (tile % tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
        at = frame.to(tl.int64) * pixels * channels + p[:, None] * channels + c[None, :]
        grad = tl.load(grad_ptr + at, mask=(p < pixels)[:, None] & inside_c[None, :], other=0.0).to(tl.float32)
        bias += grad
        if (t + kt >= 2) & (t + kt - 2 < frames):
            h = p // columns + kh - 2
            w = p % columns
            q = p + (kh - 2) * columns
            base = x_ptr + (frame + kt - 2).to(tl.int64) * pixels * channels
            a0 += grad * _tap(base, q, h, w, c, inside_c, rows, columns, channels, 0, -2)
            a1 += grad * _tap(base, q, h, w, c, inside_c, rows, columns, channels, 0, -1)
            a2 += grad * _tap(base, q, h, w, c, inside_c, rows, columns, channels, 0, 0)
            a3 += grad * _tap(base, q, h, w, c, inside_c, rows, columns, channels, 0, 1)
            a4 += grad * _tap(base, q, h, w, c, inside_c, rows, columns, channels, 0, 2)
    out = part_ptr + split.to(tl.int64) * 126 * channels + c
    first = out + (kt * 5 + kh) * 5 * channels
    tl.store(first, tl.sum(a0, 0), mask=inside_c)
    tl.store(first + channels, tl.sum(a1, 0), mask=inside_c)
    tl.store(first + 2 * channels, tl.sum(a2, 0), mask=inside_c)
    tl.store(first + 3 * channels, tl.sum(a3, 0), mask=inside_c)
    tl.store(first + 4 * channels, tl.sum(a4, 0), mask=inside_c)
    if (kt == 0) & (kh == 0):
        tl.store(out + 125 * channels, tl.sum(bias, 0), mask=inside_c)
