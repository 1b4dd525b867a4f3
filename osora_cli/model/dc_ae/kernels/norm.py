"""RMSNorm over the channels with scale, shift and the residual branch, one pass forth and one back.

Shape suffixes: P pixels (B, T, H, W in a row), C channels, S partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton

_PROGRAMS = 528  # four for each of an H100's or H200's 132 multiprocessors


def rms_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, shortcut: Tensor | None = None) -> Tensor:
    """x / sqrt(mean over channels of x^2 + eps) * weight + bias, plus `shortcut`, rounded once.

    Takes [B, C, T, H, W]; returns the same shape and dtype.
    """
    return _RmsNorm.apply(x, weight_C, bias_C, eps, shortcut)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, shortcut: Tensor | None) -> Tensor:
        x = channels_last(x)
        channels = x.shape[1]
        pixels = x.numel() // channels
        y = torch.empty_like(x)
        scale_P = torch.empty(pixels, dtype=torch.float32, device=x.device)
        block_c = triton.next_power_of_2(channels)
        block_p = max(1, 4096 // block_c)
        added = x if shortcut is None else channels_last(shortcut)
        launch(
            _forward, (triton.cdiv(pixels, block_p),),
            x, weight_C, bias_C, added, y, scale_P, pixels, channels, eps,
            ADD=shortcut is not None, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, scale_P, weight_C)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
        x, scale_P, weight_C = ctx.saved_tensors
        grad = channels_last(grad)
        channels = x.shape[1]
        pixels = scale_P.numel()
        block_c = triton.next_power_of_2(channels)
        block_p = max(1, 4096 // block_c)
        programs = min(_PROGRAMS, triton.cdiv(pixels, block_p))
        grad_x = torch.empty_like(x)
        part_S2C = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        launch(
            _backward, (programs,),
            x, grad, scale_P, weight_C, grad_x, part_S2C, pixels, channels,
            BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
        weight_grad, bias_grad = part_S2C.sum(0).to(weight_C.dtype)
        return grad_x, weight_grad, bias_grad, None, grad if ctx.needs_input_grad[4] else None


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, add_ptr, y_ptr, scale_ptr, pixels, channels, eps,
    ADD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.arange(0, BLOCK_C)
    inside = (p < pixels)[:, None] & (c < channels)[None, :]
    at = p[:, None] * channels + c[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / channels + eps)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    y = x * scale[:, None] * weight[None, :] + bias[None, :]
    if ADD:
        y += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + p, scale, mask=p < pixels)


@triton.jit
def _backward(
    x_ptr, grad_ptr, scale_ptr, weight_ptr, out_ptr, part_ptr, pixels, channels,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    bias_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(pixels, BLOCK_P), tl.num_programs(0)):
        p = tile * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
        inside = (p < pixels)[:, None] & (c < channels)[None, :]
        at = p[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + p, mask=p < pixels, other=0.0)
        normed = x * scale[:, None]
        weight_sum += grad * normed
        bias_sum += grad
        grad = grad * weight[None, :]
        mean = tl.sum(grad * normed, 1) / channels
        grad = (grad - normed * mean[:, None]) * scale[:, None]
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)
    out = part_ptr + tl.program_id(0) * 2 * channels + c
    tl.store(out, tl.sum(weight_sum, 0), mask=c < channels)
    tl.store(out + channels, tl.sum(bias_sum, 0), mask=c < channels)
