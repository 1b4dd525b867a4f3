"""Layers of the HunyuanVideo VAE (Kong et al. 2024, arXiv:2412.03603, section 4.1).

Shapes: B batch, C channels, T frames, H rows, W columns; S = H*W tokens a frame, N = T*S tokens.

Convolutions and attention are causal in time. Group norms are not: their statistics span all frames of what they are
given, as in the released network, so coding a clip in parts is not exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.model.conv import Conv3d
from osora_cli.model.precision import autocast_dtype, autocast_is_on

NORM_EPS = 1e-6
Stride = tuple[int, int, int]


def operand(x: Tensor) -> Tensor:
    """x as autocast would hand it to a convolution, cast early: what is done before it moves half the bytes."""
    return x.to(autocast_dtype(x))


def carried(x: Tensor) -> Tensor:
    """fp32 under autocast: the residual stream, so that its sums are not rounded block by block, and norms' inputs."""
    return x.float() if autocast_is_on(x.device.type) else x


class CausalConv3d(nn.Module):
    """Convolution over a clip whose edges are repeated: in space on both sides, in time in front only.

    [B, Cin, T, H, W] to [B, Cout, floor((T-1)/st)+1, ceil(H/sh), ceil(W/sw)].
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3, stride: Stride = (1, 1, 1)) -> None:
        super().__init__()
        side = kernel // 2
        self.padding = (side, side, side, side, kernel - 1, 0)
        self.conv = Conv3d(in_channels, out_channels, kernel, stride=stride)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        if any(self.padding):
            x_BCTHW = F.pad(operand(x_BCTHW), self.padding, mode="replicate")
        return self.conv(x_BCTHW)


class Resnet(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), with a 1x1x1 convolution on the way around when channels change."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels, eps=NORM_EPS)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = CausalConv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        h_BCTHW = self.conv1(F.silu(self.norm1(carried(x_BCTHW))))
        h_BCTHW = self.conv2(self.dropout(F.silu(self.norm2(carried(h_BCTHW)))))
        return carried(x_BCTHW if self.conv_shortcut is None else self.conv_shortcut(x_BCTHW)) + h_BCTHW


def frame_causal_attention(q_BNC: Tensor, k_BNC: Tensor, v_BNC: Tensor, frames: int) -> Tensor:
    """Attention of one head in which a token sees the tokens of its own frame and of those before it.

    Frame by frame, so that no N x N mask is made: memory is that of one frame's scores, work is half.
    """
    tokens = q_BNC.shape[1] // frames
    out = [
        F.scaled_dot_product_attention(q_BSC[:, None], k_BNC[:, None, :end], v_BNC[:, None, :end]).squeeze(1)
        for q_BSC, end in zip(torch.split(q_BNC, tokens, dim=1), range(tokens, q_BNC.shape[1] + 1, tokens), strict=True)
    ]
    return torch.cat(out, dim=1)


class Attention(nn.Module):
    """x + attention over the clip's tokens, time first, causal in frames; one head of all channels."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=NORM_EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        h_BNC = self.group_norm(carried(x_BCTHW)).flatten(2).transpose(1, 2)
        out_BNC = frame_causal_attention(self.to_q(h_BNC), self.to_k(h_BNC), self.to_v(h_BNC), x_BCTHW.shape[2])
        return carried(x_BCTHW) + self.to_out[0](out_BNC).transpose(1, 2).unflatten(2, x_BCTHW.shape[2:])


class MidBlock(nn.Module):
    """Resnet, attention (optional), resnet."""

    def __init__(self, channels: int, groups: int, attention: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels, groups)] if attention else [])
        self.resnets = nn.ModuleList([Resnet(channels, channels, groups, dropout) for _ in range(2)])

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x_BCTHW = self.resnets[0](x_BCTHW)
        for attention in self.attentions:
            x_BCTHW = attention(x_BCTHW)
        return self.resnets[1](x_BCTHW)


class Downsample(nn.Module):
    """Causal convolution with a stride."""

    def __init__(self, channels: int, stride: Stride) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=stride)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.conv(x_BCTHW)


class Upsample(nn.Module):
    """Nearest enlargement, the first frame in space only, then a causal convolution: T to 1 + ft * (T - 1)."""

    def __init__(self, channels: int, factor: Stride) -> None:
        super().__init__()
        self.factor = factor
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        time, rows, columns = self.factor
        x_BCTHW = operand(x_BCTHW)
        if time == 1 or x_BCTHW.shape[2] == 1:
            x_BCTHW = F.interpolate(x_BCTHW, scale_factor=(1, rows, columns), mode="nearest")
        else:
            first = F.interpolate(x_BCTHW[:, :, :1], scale_factor=(1, rows, columns), mode="nearest")
            rest = F.interpolate(x_BCTHW[:, :, 1:], scale_factor=(time, rows, columns), mode="nearest")
            x_BCTHW = torch.cat([first, rest], dim=2)
        return self.conv(x_BCTHW)
