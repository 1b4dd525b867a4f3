"""Depthwise convolution in three dimensions, stride 1, zeros around, in channels_last_3d.

cuDNN has no quick kernel for it in this layout, and torch's own takes the contiguous one only. A program walks through
the frames with one accumulator for each output frame in reach: an input is loaded and widened once for all its taps in
time, which is what the time goes into (the multiplications themselves are few). Shape suffixes: B clip, C channels,
T frames, H rows, W columns, P pixels of a frame (H * W), K taps (k^3, columns fastest).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton


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


# A program's tile by the kernel's edge: pixels, channels, warps. Tried on an H200.
FORWARD = {3: (64, 64, 4), 5: (32, 32, 2)}
BACKWARD = {3: (16, 64, 2), 5: (8, 64, 2)}
_PROGRAMS = 1056  # enough to fill an H100 or H200: eight for each multiprocessor


def _convolve(x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
    batch, channels, frames, rows, columns = x_BCTHW.shape
    edge = weight_C1KKK.shape[2]
    weight_KC = weight_C1KKK.reshape(channels, -1).t().to(torch.float32, memory_format=torch.contiguous_format)
    weight_KC = weight_KC.contiguous()
    y_BCTHW = torch.empty_like(x_BCTHW)
    block_p, block_c, warps = FORWARD[edge]
    tiles, blocks = triton.cdiv(rows * columns, block_p), triton.cdiv(channels, block_c)
    # Fewer frames a program where the tiles alone do not fill the GPU; each part reads edge - 1 frames more.
    part = frames
    while part > edge and tiles * blocks * batch * triton.cdiv(frames, part) < _PROGRAMS:
        part = triton.cdiv(part, 2)
    parts = triton.cdiv(frames, part)
    kernel = _forward_5 if edge == 5 else _forward_3
    launch(
        kernel, (tiles, blocks, batch * parts),
        x_BCTHW, weight_KC, bias_C if bias_C is not None else weight_KC, y_BCTHW,
        frames, rows, columns, channels, parts, part,
        BIAS=bias_C is not None, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return y_BCTHW


def _weight_gradient(x_BCTHW: Tensor, grad_BCTHW: Tensor, weight_C1KKK: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, frames, rows, columns = x_BCTHW.shape
    edge = weight_C1KKK.shape[2]
    block_p, block_c, warps = BACKWARD[edge]
    blocks = triton.cdiv(channels, block_c)
    splits = max(1, min(2 * _PROGRAMS // (blocks * edge), batch * triton.cdiv(rows * columns, block_p)))
    # A row of taps more holds the sums of the gradient: the bias's.
    part_SKC = torch.empty(splits, edge**3 + 1, channels, dtype=torch.float32, device=x_BCTHW.device)
    kernel = _weight_5 if edge == 5 else _weight_3
    launch(
        kernel, (blocks, edge, splits),
        x_BCTHW, grad_BCTHW, part_SKC, batch, frames, rows, columns, channels,
        BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    sum_KC = part_SKC.sum(0)
    grad_weight = sum_KC[:-1].t().reshape(weight_C1KKK.shape).to(weight_C1KKK.dtype)
    return grad_weight, sum_KC[-1].to(weight_C1KKK.dtype)


@triton.jit
def _tap(base, p, h, w, c, inside_c, rows, columns, channels, dh, dw: tl.constexpr):
    """x at an offset of (dh, dw) from the pixels p of a frame, 0 outside it, in fp32."""
    valid = (h + dh >= 0) & (h + dh < rows) & (w + dw >= 0) & (w + dw < columns)
    at = (p + dh * columns + dw)[:, None] * channels + c[None, :]
    return tl.load(base + at, mask=valid[:, None] & inside_c[None, :], other=0.0).to(tl.float32)


@triton.jit
def _row(weight_ptr, tap, c, inside_c, channels):
    """The weights of one tap, for a tile of pixels."""
    return tl.load(weight_ptr + tap * channels + c, mask=inside_c, other=0.0)[None, :]


@triton.jit
def _forward_3(
    x_ptr, weight_ptr, bias_ptr, y_ptr, frames, rows, columns, channels, parts, part,
    BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    h, w, pixels = p // columns, p % columns, rows * columns
    inside_c = c < channels
    inside = (p < pixels)[:, None] & inside_c[None, :]
    first_frame = (tl.program_id(2) // parts).to(tl.int64) * frames
    begin = tl.program_id(2) % parts * part
    end = tl.minimum(begin + part, frames)
    start = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if BIAS:
        start += tl.load(bias_ptr + c, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    # Output frames t - 1, t, t + 1 of the input frame t.
    y0, y1, y2 = start, start, start
    for t in range(begin - 1, end + 1):
        if (t >= 0) & (t < frames):
            base = x_ptr + (first_frame + t) * pixels * channels
            for kh in range(3):
                for kw in tl.static_range(3):
                    x = _tap(base, p, h, w, c, inside_c, rows, columns, channels, kh - 1, kw - 1)
                    tap = kh * 3 + kw
                    y0 += x * _row(weight_ptr, tap + 18, c, inside_c, channels)
                    y1 += x * _row(weight_ptr, tap + 9, c, inside_c, channels)
                    y2 += x * _row(weight_ptr, tap, c, inside_c, channels)
        if t > begin:
            out = y_ptr + (first_frame + t - 1) * pixels * channels + p[:, None] * channels + c[None, :]
            tl.store(out, y0.to(y_ptr.dtype.element_ty), mask=inside)
        y0, y1, y2 = y1, y2, start


@triton.jit
def _forward_5(
    x_ptr, weight_ptr, bias_ptr, y_ptr, frames, rows, columns, channels, parts, part,
    BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    h, w, pixels = p // columns, p % columns, rows * columns
    inside_c = c < channels
    inside = (p < pixels)[:, None] & inside_c[None, :]
    first_frame = (tl.program_id(2) // parts).to(tl.int64) * frames
    begin = tl.program_id(2) % parts * part
    end = tl.minimum(begin + part, frames)
    start = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if BIAS:
        start += tl.load(bias_ptr + c, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    # Output frames t - 2 .. t + 2 of the input frame t.
    y0, y1, y2, y3, y4 = start, start, start, start, start
    for t in range(begin - 2, end + 2):
        if (t >= 0) & (t < frames):
            base = x_ptr + (first_frame + t) * pixels * channels
            for kh in range(5):
                for kw in tl.static_range(5):
                    x = _tap(base, p, h, w, c, inside_c, rows, columns, channels, kh - 2, kw - 2)
                    tap = kh * 5 + kw
                    y0 += x * _row(weight_ptr, tap + 100, c, inside_c, channels)
                    y1 += x * _row(weight_ptr, tap + 75, c, inside_c, channels)
                    y2 += x * _row(weight_ptr, tap + 50, c, inside_c, channels)
                    y3 += x * _row(weight_ptr, tap + 25, c, inside_c, channels)
                    y4 += x * _row(weight_ptr, tap, c, inside_c, channels)
        if t > begin + 1:
            out = y_ptr + (first_frame + t - 2) * pixels * channels + p[:, None] * channels + c[None, :]
            tl.store(out, y0.to(y_ptr.dtype.element_ty), mask=inside)
        y0, y1, y2, y3, y4 = y1, y2, y3, y4, start


@triton.jit
def _frame(ptr, frame, t, frames, pixels, p, c, inside_c, channels):
    """The pixels p of frame t of a clip that begins at `frame`, 0 after its end, in fp32."""
    at = (frame + t) * pixels * channels + p[:, None] * channels + c[None, :]
    there = (t + tl.zeros((1, 1), tl.int32)) < frames
    inside = (p < pixels)[:, None] & inside_c[None, :] & there
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _keep(out, row, value, channels, inside_c):
    tl.store(out + row * channels, tl.sum(value, 0), mask=inside_c)


@triton.jit
def _weight_3(
    x_ptr, grad_ptr, part_ptr, batch, frames, rows, columns, channels,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The 9 taps of one offset in rows, named a(time)(column), over a part of the pixels of all frames."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    kh = tl.program_id(1)
    inside_c = c < channels
    pixels = rows * columns
    tiles = tl.cdiv(pixels, BLOCK_P)
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    a00, a01, a02 = zero, zero, zero
    a10, a11, a12 = zero, zero, zero
    a20, a21, a22 = zero, zero, zero
    bias = zero
    for tile in range(tl.program_id(2), batch * tiles, tl.num_programs(2)):
        frame = (tile // tiles + tl.zeros((1,), tl.int64)) * frames
        p = tile % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        h, w = p // columns, p % columns
        # Gradients of the output frames t + 1 .. t - 1 of the input frame t.
        g1 = _frame(grad_ptr, frame, 0, frames, pixels, p, c, inside_c, channels)
        g2 = zero
        bias += g1
        for t in range(frames):
            g0 = _frame(grad_ptr, frame, t + 1, frames, pixels, p, c, inside_c, channels)
            bias += g0
            base = x_ptr + (frame + t) * pixels * channels
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 1, -1)
            a00 += x * g0
            a10 += x * g1
            a20 += x * g2
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 1, 0)
            a01 += x * g0
            a11 += x * g1
            a21 += x * g2
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 1, 1)
            a02 += x * g0
            a12 += x * g1
            a22 += x * g2
            g2, g1 = g1, g0
    out = part_ptr + tl.program_id(2).to(tl.int64) * 28 * channels + c
    row = kh * 3
    _keep(out, row + 0, a00, channels, inside_c)
    _keep(out, row + 1, a01, channels, inside_c)
    _keep(out, row + 2, a02, channels, inside_c)
    _keep(out, row + 9, a10, channels, inside_c)
    _keep(out, row + 10, a11, channels, inside_c)
    _keep(out, row + 11, a12, channels, inside_c)
    _keep(out, row + 18, a20, channels, inside_c)
    _keep(out, row + 19, a21, channels, inside_c)
    _keep(out, row + 20, a22, channels, inside_c)
    if kh == 0:
        _keep(out, 27, bias, channels, inside_c)


@triton.jit
def _weight_5(
    x_ptr, grad_ptr, part_ptr, batch, frames, rows, columns, channels,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The 25 taps of one offset in rows, named a(time)(column), over a part of the pixels of all frames."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    kh = tl.program_id(1)
    inside_c = c < channels
    pixels = rows * columns
    tiles = tl.cdiv(pixels, BLOCK_P)
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    a00, a01, a02, a03, a04 = zero, zero, zero, zero, zero
    a10, a11, a12, a13, a14 = zero, zero, zero, zero, zero
    a20, a21, a22, a23, a24 = zero, zero, zero, zero, zero
    a30, a31, a32, a33, a34 = zero, zero, zero, zero, zero
    a40, a41, a42, a43, a44 = zero, zero, zero, zero, zero
    bias = zero
    for tile in range(tl.program_id(2), batch * tiles, tl.num_programs(2)):
        frame = (tile // tiles + tl.zeros((1,), tl.int64)) * frames
        p = tile % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        h, w = p // columns, p % columns
        # Gradients of the output frames t + 2 .. t - 2 of the input frame t.
        g1 = _frame(grad_ptr, frame, 1, frames, pixels, p, c, inside_c, channels)
        g2 = _frame(grad_ptr, frame, 0, frames, pixels, p, c, inside_c, channels)
        # Zeros, by loads past the end: of two carried values that begin as one value and are handed on, Triton 3.6 and
        # 3.9 drop one.
        g3 = _frame(grad_ptr, frame, frames, frames, pixels, p, c, inside_c, channels)
        g4 = _frame(grad_ptr, frame, frames + 1, frames, pixels, p, c, inside_c, channels)
        bias += g1 + g2
        for t in range(frames):
            g0 = _frame(grad_ptr, frame, t + 2, frames, pixels, p, c, inside_c, channels)
            bias += g0
            base = x_ptr + (frame + t) * pixels * channels
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 2, -2)
            a00 += x * g0
            a10 += x * g1
            a20 += x * g2
            a30 += x * g3
            a40 += x * g4
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 2, -1)
            a01 += x * g0
            a11 += x * g1
            a21 += x * g2
            a31 += x * g3
            a41 += x * g4
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 2, 0)
            a02 += x * g0
            a12 += x * g1
            a22 += x * g2
            a32 += x * g3
            a42 += x * g4
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 2, 1)
            a03 += x * g0
            a13 += x * g1
            a23 += x * g2
            a33 += x * g3
            a43 += x * g4
            x = _tap(base[:, None], p, h, w, c, inside_c, rows, columns, channels, kh - 2, 2)
            a04 += x * g0
            a14 += x * g1
            a24 += x * g2
            a34 += x * g3
            a44 += x * g4
            g4, g3, g2, g1 = g3, g2, g1, g0
    out = part_ptr + tl.program_id(2).to(tl.int64) * 126 * channels + c
    row = kh * 5
    _keep(out, row + 0, a00, channels, inside_c)
    _keep(out, row + 1, a01, channels, inside_c)
    _keep(out, row + 2, a02, channels, inside_c)
    _keep(out, row + 3, a03, channels, inside_c)
    _keep(out, row + 4, a04, channels, inside_c)
    _keep(out, row + 25, a10, channels, inside_c)
    _keep(out, row + 26, a11, channels, inside_c)
    _keep(out, row + 27, a12, channels, inside_c)
    _keep(out, row + 28, a13, channels, inside_c)
    _keep(out, row + 29, a14, channels, inside_c)
    _keep(out, row + 50, a20, channels, inside_c)
    _keep(out, row + 51, a21, channels, inside_c)
    _keep(out, row + 52, a22, channels, inside_c)
    _keep(out, row + 53, a23, channels, inside_c)
    _keep(out, row + 54, a24, channels, inside_c)
    _keep(out, row + 75, a30, channels, inside_c)
    _keep(out, row + 76, a31, channels, inside_c)
    _keep(out, row + 77, a32, channels, inside_c)
    _keep(out, row + 78, a33, channels, inside_c)
    _keep(out, row + 79, a34, channels, inside_c)
    _keep(out, row + 100, a40, channels, inside_c)
    _keep(out, row + 101, a41, channels, inside_c)
    _keep(out, row + 102, a42, channels, inside_c)
    _keep(out, row + 103, a43, channels, inside_c)
    _keep(out, row + 104, a44, channels, inside_c)
    if kh == 0:
        _keep(out, 125, bias, channels, inside_c)
