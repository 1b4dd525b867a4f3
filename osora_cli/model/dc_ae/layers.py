"""Convolution, norm and resampling of the Video DC-AE.

Shape suffixes: B clip, C channels, T frames, H rows, W columns; small letters are the offsets inside a block that a
resampling step folds into, or unfolds from, the channels. Activations run in channels_last_3d, where a pixel's
channels lie side by side: convolutions are faster that way on CPU and CUDA, and norms read memory in order. Weights
stay contiguous (FSDP2 asks for that); a convolution brings its weight into the layout of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.model import conv
from osora_cli.model.dc_ae import kernels
from osora_cli.model.dc_ae.ops import (
    add_spread,
    bias_silu,
    depthwise_conv,
    fold_sum,
    grouped_pointwise,
    rms_norm,
    spread,
)

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "relu": F.relu}

# What one step of resampling changes along (T, H, W).
Factors = tuple[int, int, int]
SPACE: Factors = (1, 2, 2)
SPACE_TIME: Factors = (2, 2, 2)


class RMSNorm3d(nn.Module):
    """x / sqrt(mean of x^2 over the channels + eps), times weight, plus bias.

    The statistics and the division are fp32 whatever the input's dtype; the scale and shift run in that dtype.
    Takes [B, C, ...]; returns the same shape and dtype, plus `shortcut` if there is one.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.bias, self.eps, shortcut)


class Conv3d(conv.Conv3d):
    """Convolution with zero padding, through the quickest operation for its shape.

    With `with_bias=False` the bias is left to what follows; only for one group.
    """

    def forward(self, input: Tensor, with_bias: bool = True) -> Tensor:
        if self.groups == self.in_channels > 1 and self.groups == self.out_channels:
            return depthwise_conv(input, self.weight, self.bias)
        if self.kernel_size == (1, 1, 1) and self.stride == (1, 1, 1):
            if self.groups > 1 and self.bias is None:
                return grouped_pointwise(input, self.weight, self.groups)
            if self.groups == 1 and not conv.in_fp32(input):
                # A product of matrices where a pixel's channels lie side by side.
                bias = self.bias if with_bias else None
                y_BTHWC = F.linear(input.permute(0, 2, 3, 4, 1), self.weight.flatten(1), bias)
                return y_BTHWC.permute(0, 4, 1, 2, 3)
        return super().forward(input) if with_bias else self._conv_forward(input, self.weight, None)


class ConvLayer(nn.Module):
    """Convolution with zeros around on all sides (k // 2, in time too: nothing is causal), then norm, then activation.

    Args:
        kernel: odd edge of the cubic kernel.
        stride: step along (T, H, W).
        norm: whether an RMSNorm3d follows.
        act: applied last.

    `shortcut` in the call is added to what the norm gives.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        stride: Factors = (1, 1, 1),
        groups: int = 1,
        bias: bool = True,
        norm: bool = False,
        act: str | None = None,
    ) -> None:
        super().__init__()
        self.conv = Conv3d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias
        )
        self.norm = RMSNorm3d(out_channels) if norm else None
        self.act = ACTIVATIONS[act] if act else None
        self._fuses_bias = bias and not norm and act == "silu" and groups == 1

    def forward(self, x_BCTHW: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if self._fuses_bias and kernels.usable(x_BCTHW):
            assert self.conv.bias is not None
            return bias_silu(self.conv(x_BCTHW, with_bias=False), self.conv.bias)
        x_BCTHW = self.conv(x_BCTHW)
        if self.norm is not None:
            x_BCTHW = self.norm(x_BCTHW, shortcut)
        return x_BCTHW if self.act is None else self.act(x_BCTHW)


def average_shortcut(x_BCTHW: Tensor, out_channels: int, factors: Factors = (1, 1, 1)) -> Tensor:
    """Fold blocks of `factors` (each 1 or 2) into the channels, then average consecutive channels.

    The folded channel is c * |block| + the offset in the block (time slowest, column fastest); output channel o is the
    mean of the folded channels o * g .. o * g + g - 1, with g = C * |block| / out_channels.

    Returns:
        [B, out_channels, T / ft, H / fh, W / fw].
    """
    group = x_BCTHW.shape[1] * prod(factors) // out_channels
    # A group takes offsets from the fastest axis on: those axes are averaged where they lie, the others are folded.
    averaged, group = _fastest_axes(factors, group)
    x_BTHWC = x_BCTHW.permute(0, 2, 3, 4, 1)
    if averaged:
        x_BTHWC = fold_sum(x_BTHWC, averaged) / 2 ** len(averaged)
    t, h, w = (1 if axis in averaged else factor for axis, factor in enumerate(factors, 1))
    if (t, h, w) != (1, 1, 1):
        x_BTtHhWwC = x_BTHWC.unflatten(3, (-1, w)).unflatten(2, (-1, h)).unflatten(1, (-1, t))
        x_BTHWC = x_BTtHhWwC.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)
    if group > 1:
        x_BTHWC = x_BTHWC.unflatten(4, (-1, group)).mean(-1)
    return x_BTHWC.permute(0, 4, 1, 2, 3)


def add_duplicated(y_BCTHW: Tensor, x_BCTHW: Tensor, factors: Factors = (1, 1, 1)) -> Tensor:
    """y plus the duplicating shortcut of x, the transpose of `average_shortcut` up to a factor.

    Each channel of x is repeated g = C_out * |block| / C_in times in a row, then channels are unfolded into blocks of
    `factors` with the channel order of `average_shortcut`.

    Args:
        y_BCTHW: [B, C_out, T * ft, H * fh, W * fw].
        x_BCTHW: [B, C_in, T, H, W].
    """
    repeat = y_BCTHW.shape[1] * prod(factors) // x_BCTHW.shape[1]
    # Offsets along the fastest axes get copies of one channel, the others come from the channels.
    copied, repeat = _fastest_axes(factors, repeat)
    x_BTHWC = x_BCTHW.permute(0, 2, 3, 4, 1)
    if repeat > 1:
        x_BTHWC = x_BTHWC.unsqueeze(-1).expand(*x_BTHWC.shape, repeat).flatten(4)
    t, h, w = (1 if axis in copied else factor for axis, factor in enumerate(factors, 1))
    if (t, h, w) != (1, 1, 1):
        x_BTHWCthw = x_BTHWC.unflatten(4, (-1, t, h, w))
        x_BTHWC = x_BTHWCthw.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return add_spread(y_BCTHW.permute(0, 2, 3, 4, 1), x_BTHWC, copied).permute(0, 4, 1, 2, 3)


def upsample(x_BCTHW: Tensor, factors: Factors) -> Tensor:
    """Nearest upsampling: each pixel becomes a block of `factors` (each 1 or 2)."""
    axes = tuple(axis for axis, factor in enumerate(factors, 1) if factor == 2)
    return spread(x_BCTHW.permute(0, 2, 3, 4, 1), axes).permute(0, 4, 1, 2, 3)


def _fastest_axes(factors: Factors, count: int) -> tuple[tuple[int, ...], int]:
    """Axes of [B, T, H, W, C], from the fastest on, whose factors divide `count` in turn, and what is left of it."""
    axes = []
    for axis in (3, 2, 1):
        factor = factors[axis - 1]
        if count % factor:
            break
        if factor > 1:
            axes.append(axis)
            count //= factor
    return tuple(axes), count
