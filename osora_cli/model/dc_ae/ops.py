"""Operations whose plain form costs too much time or memory, each with its own backward pass.

All take and return [B, C, T, H, W] and are quickest in channels_last_3d. Shape suffixes: B clip, C channels, T frames,
H rows, W columns, P pixels (B, T, H, W in a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

from osora_cli.model.conv import in_fp32
from osora_cli.model.dc_ae import kernels
from osora_cli.model.precision import autocast, autocast_dtype


def rms_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, shortcut: Tensor | None = None) -> Tensor:
    """x / sqrt(mean over channels of x^2 + eps) * weight + bias, plus `shortcut`; [B, C, ...] in, the same out.

    Statistics and division are fp32; scale and shift run in x's dtype (in fp32 up to the end where the kernel does
    it). Keeps x and a number a pixel for the backward pass, where the composed form would keep the normed x too.
    """
    if x.dim() == 5 and kernels.usable(x):
        from osora_cli.model.dc_ae.kernels import norm

        return norm.rms_norm(x, weight_C, bias_C, eps, shortcut)
    if x.is_cuda:
        # torch's own kernel norms in one pass, forth and back.
        with torch.autocast("cuda", enabled=False):
            normed_PC = F.rms_norm(_rows(x), (x.shape[1],), eps=eps)
            y = _unrows(torch.addcmul(bias_C.to(x.dtype), normed_PC, weight_C.to(x.dtype)), x)
    else:
        y = _RmsNorm.apply(x, weight_C.to(x.dtype), bias_C.to(x.dtype), eps)  # type: ignore[no-untyped-call]
    return y if shortcut is None else shortcut + y


def bias_silu(x_BCTHW: Tensor, bias_C: Tensor) -> Tensor:
    """silu(x + bias): what follows a convolution that left its bias out. Only where `kernels.usable(x)`."""
    from osora_cli.model.dc_ae.kernels import activation

    return activation.bias_silu(x_BCTHW, bias_C)


def silu_gate(x_BCTHW: Tensor) -> Tensor:
    """First half of the channels times silu of the second."""
    if kernels.usable(x_BCTHW):
        from osora_cli.model.dc_ae.kernels import activation

        return activation.silu_gate(x_BCTHW)
    value_BCTHW, gate_BCTHW = x_BCTHW.chunk(2, dim=1)
    return value_BCTHW * F.silu(gate_BCTHW)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
        x_PC = _rows(x)
        with autocast(x.device.type, enabled=False):
            length_P1 = torch.linalg.vector_norm(x_PC, dim=1, keepdim=True, dtype=_wide(x))
            scale_P1 = torch.rsqrt(length_P1.square() / x_PC.shape[1] + eps)
            y_PC = torch.addcmul(bias_C, (x_PC * scale_P1).to(x.dtype), weight_C)
        ctx.save_for_backward(x, scale_P1, weight_C)
        return _unrows(y_PC, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale_P1, weight_C = ctx.saved_tensors
        grad_PC = _rows(grad)
        normed_PC = _rows(x) * scale_P1
        product_PC = grad_PC * normed_PC
        grad_weight_C = product_PC.sum(0).to(weight_C.dtype)
        # d y_c / d x_j = scale * (delta_cj * w_c - normed_c * w_c * normed_j / C)
        mean_P = product_PC @ weight_C.to(product_PC.dtype) / weight_C.numel()
        scaled_PC = grad_PC * weight_C
        grad_x_PC = torch.addcmul(scaled_PC.to(product_PC.dtype), normed_PC, mean_P.unsqueeze(1), value=-1)
        grad_x_PC = grad_x_PC.mul_(scale_P1).to(x.dtype)
        return _unrows(grad_x_PC, x), grad_weight_C, grad_PC.sum(0, dtype=product_PC.dtype).to(weight_C.dtype), None


def depthwise_conv(x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
    """Convolution of each channel by itself, stride 1, zeros around.

    Without the kernels the backward pass takes the forward one for the input's gradient and, frame by frame, the
    two-dimensional one for the weight's: many times faster than the three-dimensional backward of torch.
    """
    dtype = autocast_dtype(x_BCTHW)
    bias_C = None if bias_C is None else bias_C.to(dtype)
    x_BCTHW, weight_C1KKK = x_BCTHW.to(dtype), weight_C1KKK.to(dtype)
    if kernels.usable(x_BCTHW) and weight_C1KKK.shape[2] in (3, 5):
        from osora_cli.model.dc_ae.kernels import depthwise

        return depthwise.depthwise_conv(x_BCTHW, weight_C1KKK, bias_C)
    if in_fp32(x_BCTHW):
        wide = (x_BCTHW.float(), weight_C1KKK.float(), None if bias_C is None else bias_C.float())
        with autocast("cpu", enabled=False):
            return _DepthwiseConv.apply(*wide).to(dtype)  # type: ignore[no-untyped-call]
    return _DepthwiseConv.apply(x_BCTHW, weight_C1KKK, bias_C)  # type: ignore[no-untyped-call]


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_BCTHW, weight_C1KKK)
        return _depthwise(x_BCTHW, weight_C1KKK, bias_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCTHW: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_BCTHW, weight_C1KKK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = _depthwise(grad_BCTHW, weight_C1KKK.flip(2, 3, 4), None) if needs_x else None
        grad_weight = _depthwise_weight(x_BCTHW, grad_BCTHW, weight_C1KKK) if needs_weight else None
        grad_bias = grad_BCTHW.sum((0, 2, 3, 4)) if needs_bias else None
        return grad_x, grad_weight, grad_bias


def _depthwise(x_BCTHW: Tensor, weight_C1KKK: Tensor, bias_C: Tensor | None) -> Tensor:
    if x_BCTHW.is_cuda:
        # Five to seven times faster on an H200 in the contiguous layout, the copies included.
        x_BCTHW = x_BCTHW.contiguous()
    y_BCTHW = F.conv3d(x_BCTHW, weight_C1KKK, bias_C, padding=weight_C1KKK.shape[2] // 2, groups=x_BCTHW.shape[1])
    return y_BCTHW.contiguous(memory_format=torch.channels_last_3d)


def upsample_conv(x_BCTHW: Tensor, weight_OC333: Tensor, bias_O: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """conv(nearest upsampling of x) + bias + x duplicated. Only where `kernels.usable(x)`."""
    from osora_cli.model.dc_ae.kernels import upsample

    return upsample.upsample_conv(x_BCTHW.to(autocast_dtype(x_BCTHW)), weight_OC333, bias_O, factors)


def linear_attention(sources: Sequence[Tensor], dim: int, eps: float) -> Tensor:
    """ReLU linear attention of the heads of all sources. Only where `kernels.usable(sources[0])`."""
    from osora_cli.model.dc_ae.kernels import attention

    return attention.linear_attention(sources, dim, eps)


def grouped_pointwise(x_BCTHW: Tensor, weight_OI111: Tensor, groups: int) -> Tensor:
    """Convolution of edge 1 in groups, without bias: a product of matrices for each group."""
    dtype = autocast_dtype(x_BCTHW)
    if kernels.usable(x_BCTHW):
        from osora_cli.model.dc_ae.kernels import grouped

        if grouped.takes(weight_OI111, groups):
            return grouped.grouped_pointwise(x_BCTHW.to(dtype), weight_OI111.to(dtype))
    x_PC = _rows(x_BCTHW)
    x_GPI = x_PC.view(x_PC.shape[0], groups, -1).transpose(0, 1)
    weight_GIO = weight_OI111.view(groups, -1, weight_OI111.shape[1]).transpose(1, 2)
    y_PC = torch.bmm(x_GPI, weight_GIO).transpose(0, 1).flatten(1)
    return _unrows(y_PC, x_BCTHW)


def _depthwise_weight(x_BCTHW: Tensor, grad_BCTHW: Tensor, weight_C1KKK: Tensor) -> Tensor:
    """For each tap in time, frames of x against the frames of the gradient that this tap fed."""
    channels, _, kernel, *_ = weight_C1KKK.shape
    frames, half = x_BCTHW.shape[2], kernel // 2
    x_BTCHW, grad_BTCHW = x_BCTHW.transpose(1, 2), grad_BCTHW.transpose(1, 2)
    taps = []
    for shift in range(-half, half + 1):
        if abs(shift) >= frames:
            taps.append(torch.zeros_like(weight_C1KKK[:, :, 0]))
            continue
        fed = x_BTCHW[:, max(shift, 0) : frames + min(shift, 0)].flatten(0, 1)
        made = grad_BTCHW[:, max(-shift, 0) : frames - max(shift, 0)].flatten(0, 1)
        size = (channels, 1, kernel, kernel)
        taps.append(conv2d_weight(fed, size, made, padding=half, groups=channels))
    return torch.stack(taps, dim=2)


def fold_sum(x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
    """Sum of neighbouring pairs along each of `axes` (their sizes are even), in the input's dtype."""
    return _FoldSum.apply(x_BTHWC, axes)  # type: ignore[no-untyped-call]


def spread(x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
    """Each entry twice in a row along each of `axes`: the transpose of `fold_sum`."""
    return _Spread.apply(x_BTHWC, axes)  # type: ignore[no-untyped-call]


def add_spread(y_BTHWC: Tensor, x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
    """y + spread(x, axes), without making the latter."""
    return _AddSpread.apply(y_BTHWC, x_BTHWC, axes)  # type: ignore[no-untyped-call]


class _FoldSum(torch.autograd.Function):
    # Reductions over strided pairs are slow, and so are those by which autograd would undo an expansion: additions of
    # the two halves take a tenth of the time.
    @staticmethod
    def forward(ctx: Any, x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
        ctx.axes = axes
        return _pair_sum(x_BTHWC, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _twice(grad, ctx.axes), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
        ctx.axes = axes
        return _twice(x_BTHWC, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _pair_sum(grad, ctx.axes), None


class _AddSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BTHWC: Tensor, x_BTHWC: Tensor, axes: Sequence[int]) -> Tensor:
        ctx.axes = axes
        pairs = y_BTHWC
        for axis in sorted(axes, reverse=True):
            pairs = pairs.unflatten(axis, (-1, 2))
            x_BTHWC = x_BTHWC.unsqueeze(axis + 1)
        return (pairs + x_BTHWC).reshape(y_BTHWC.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, _pair_sum(grad, ctx.axes), None


def _pair_sum(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        even, odd = x.unflatten(axis, (-1, 2)).unbind(axis + 1)
        x = even + odd
    return x


def _twice(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        shape = list(x.shape)
        shape.insert(axis + 1, 2)
        x = x.unsqueeze(axis + 1).expand(shape)
    for axis in sorted(axes):
        x = x.flatten(axis, axis + 1)
    return x


def _wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor) -> Tensor:
    """[B, C, ...] -> [P, C], a view where channels lie side by side."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _unrows(x_PC: Tensor, like: Tensor) -> Tensor:
    return x_PC.view(like.shape[0], *like.shape[2:], -1).movedim(-1, 1)
