"""Convolution of edge 1 in groups of 16 to 64 channels, in channels_last_3d.

Shape suffixes: P pixels (B, T, H, W in a row), C channels, O and I channels of a group out and in, S partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton

_BLOCK_P = 128
_PROGRAMS = 2112


def takes(weight_OI111: Tensor, groups: int) -> bool:
    """Whether a group's channels are as many out as in, and a power of two that a matrix unit takes."""
    width = weight_OI111.shape[1]
    return weight_OI111.shape[0] == groups * width and width in (16, 32, 64)


def grouped_pointwise(x_BCTHW: Tensor, weight_OI111: Tensor) -> Tensor:
    """Each group of channels times its own square matrix, without bias."""
    return _Grouped.apply(x_BCTHW, weight_OI111)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCTHW: Tensor, weight_OI111: Tensor) -> Tensor:
        x_BCTHW = channels_last(x_BCTHW)
        ctx.save_for_backward(x_BCTHW, weight_OI111)
        return _multiply(x_BCTHW, weight_OI111, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        x_BCTHW, weight_OI111 = ctx.saved_tensors
        grad_BCTHW = channels_last(grad_BCTHW)
        channels, width = weight_OI111.shape[:2]
        pixels = x_BCTHW.numel() // channels
        groups = channels // width
        splits = max(1, min(_PROGRAMS // groups, triton.cdiv(pixels, _BLOCK_P)))
        part_SOI = torch.empty(splits, channels, width, dtype=torch.float32, device=x_BCTHW.device)
        launch(
            _weight, (groups, splits),
            x_BCTHW, grad_BCTHW, part_SOI, pixels, channels,
            WIDTH=width, EXACT=x_BCTHW.dtype == torch.float32, BLOCK_P=_BLOCK_P, num_warps=4,
        )  # fmt: skip
        grad_weight = part_SOI.sum(0).view(weight_OI111.shape).to(weight_OI111.dtype)
        return _multiply(grad_BCTHW, weight_OI111, transposed=False), grad_weight


def _multiply(x_BCTHW: Tensor, weight_OI111: Tensor, *, transposed: bool) -> Tensor:
    channels, width = weight_OI111.shape[:2]
    pixels = x_BCTHW.numel() // channels
    y_BCTHW = torch.empty_like(x_BCTHW)
    launch(
        _product, (channels // width * triton.cdiv(pixels, _BLOCK_P),),
        x_BCTHW, weight_OI111.contiguous(), y_BCTHW, pixels, channels,
        WIDTH=width, TRANSPOSED=transposed, EXACT=x_BCTHW.dtype == torch.float32, BLOCK_P=_BLOCK_P, num_warps=4,
    )  # fmt: skip
    return y_BCTHW


@triton.jit
def _product(
    x_ptr, weight_ptr, y_ptr, pixels, channels,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Groups first: neighbours read the same lines of memory.
    groups = channels // WIDTH
    group = tl.program_id(0) % groups
    c = tl.arange(0, WIDTH)
    p = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = p[:, None] * channels + group * WIDTH + c[None, :]
    inside = (p < pixels)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + group * WIDTH * WIDTH + c[:, None] * WIDTH + c[None, :])
    if TRANSPOSED:
        weight = tl.trans(weight)
    if EXACT:
        y = tl.dot(x, weight, input_precision="ieee")
    else:
        y = tl.dot(x, weight)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight(
    x_ptr, grad_ptr, part_ptr, pixels, channels,
    WIDTH: tl.constexpr, EXACT: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(pixels, BLOCK_P), tl.num_programs(1)):
        p = tile * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
        at = p[:, None] * channels + group * WIDTH + c[None, :]
        inside = (p < pixels)[:, None]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
        if EXACT:
            total += tl.dot(tl.trans(grad), x, input_precision="ieee")
        else:
            total += tl.dot(tl.trans(grad), x)
    out = part_ptr + tl.program_id(1).to(tl.int64) * channels * WIDTH + group * WIDTH * WIDTH
    tl.store(out + c[:, None] * WIDTH + c[None, :], total)
