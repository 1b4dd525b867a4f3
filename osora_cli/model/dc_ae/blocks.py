"""Blocks of the Video DC-AE: residual, EViT (linear attention and gated convolution), down, up, and the ends.

Names of submodules are those of released weights. Shape suffixes: B clip, C channels, T frames, H rows, W columns,
N positions (T*H*W, frames slowest), h heads, d channels of a head, e = d + 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.config.models.dc_ae import HEAD_CHANNELS
from osora_cli.model.dc_ae import kernels
from osora_cli.model.dc_ae.layers import (
    ACTIVATIONS,
    SPACE,
    SPACE_TIME,
    Conv3d,
    ConvLayer,
    RMSNorm3d,
    add_duplicated,
    average_shortcut,
    upsample,
)
from osora_cli.model.dc_ae.ops import linear_attention, silu_gate, upsample_conv
from osora_cli.model.precision import autocast


class OpSequential(nn.Module):
    """Modules in a row, under the key `op_list`."""

    def __init__(self, ops: list[nn.Module]) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(ops)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        for op in self.op_list:
            x_BCTHW = op(x_BCTHW)
        return x_BCTHW


class Residual(nn.Module):
    """x + main(x); `main` ends in a norm, and adds x there."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.main(x_BCTHW, shortcut=x_BCTHW)


class ResBlockMain(nn.Module):
    """conv, activation, conv, norm."""

    def __init__(self, channels: int, act: str) -> None:
        super().__init__()
        self.conv1 = ConvLayer(channels, channels, act=act)
        self.conv2 = ConvLayer(channels, channels, bias=False, norm=True)

    def forward(self, x_BCTHW: Tensor, shortcut: Tensor | None = None) -> Tensor:
        return self.conv2(self.conv1(x_BCTHW), shortcut)


class LiteMLA(nn.Module):
    """ReLU linear attention over all positions of the clip (EfficientViT, Cai et al. 2023, arXiv:2205.14756).

    For each scale, q, k and v also come from a depthwise convolution of that edge; the heads of all scales stand
    side by side. Cost and memory grow linearly with the number of positions.
    """

    def __init__(self, channels: int, dim: int = HEAD_CHANNELS, scales: tuple[int, ...] = (5,), eps: float = 1e-15):
        super().__init__()
        self.dim, self.eps = dim, eps
        heads = channels // dim
        self.qkv = ConvLayer(channels, 3 * heads * dim, kernel=1, bias=False)
        self.aggreg = nn.ModuleList(
            nn.Sequential(
                Conv3d(3 * heads * dim, 3 * heads * dim, s, padding=s // 2, groups=3 * heads * dim, bias=False),
                Conv3d(3 * heads * dim, 3 * heads * dim, 1, groups=3 * heads, bias=False),
            )
            for s in scales
        )
        self.proj = ConvLayer(heads * dim * (1 + len(scales)), channels, kernel=1, bias=False, norm=True)

    def forward(self, x_BCTHW: Tensor, shortcut: Tensor | None = None) -> Tensor:
        qkv_BCTHW = self.qkv(x_BCTHW)
        scales = [qkv_BCTHW, *(agg(qkv_BCTHW) for agg in self.aggreg)]
        if kernels.usable(qkv_BCTHW):
            out_BCTHW = linear_attention(scales, self.dim, self.eps)
        else:
            with autocast(x_BCTHW.device.type, enabled=False):
                out_BCTHW = self.attend(torch.cat(scales, dim=1) if len(scales) > 1 else qkv_BCTHW)
        return self.proj(out_BCTHW, shortcut)

    def attend(self, qkv_BCTHW: Tensor) -> Tensor:
        """relu(q) (relu(k)^T v) / sum, head by head: [B, 3hd, T, H, W] -> [B, hd, T, H, W] in the input's dtype.

        Channels are head-major: for each head q, then k, then v. bf16 stays bf16 up to the division; fp16 would
        overflow in the sums and is raised to fp32 first.
        """
        frames, rows, columns = qkv_BCTHW.shape[2:]
        qkv_BNh3d = qkv_BCTHW.permute(0, 2, 3, 4, 1).flatten(1, 3).unflatten(2, (-1, 3 * self.dim))
        if qkv_BNh3d.dtype == torch.float16:
            qkv_BNh3d = qkv_BNh3d.float()
        q_BhNd, k_BhNd, v_BhNd = qkv_BNh3d.transpose(1, 2).split(self.dim, dim=-1)
        q_BhNd, k_BhNd = F.relu(q_BhNd), F.relu(k_BhNd)
        v_BhNe = F.pad(v_BhNd, (0, 1), value=1.0)
        state_Bhde = k_BhNd.transpose(-1, -2) @ v_BhNe
        out_BhNe = (q_BhNd @ state_Bhde).float()
        out_BhNd = out_BhNe[..., :-1] / (out_BhNe[..., -1:] + self.eps)
        out_BNC = out_BhNd.to(qkv_BCTHW.dtype).transpose(1, 2).flatten(2)
        return out_BNC.unflatten(1, (frames, rows, columns)).permute(0, 4, 1, 2, 3)


class GLUMBConv(nn.Module):
    """Widen, depthwise convolution, gate one half with the other, narrow, norm."""

    def __init__(self, channels: int, act: str = "silu", expand: int = 4) -> None:
        super().__init__()
        mid = channels * expand
        self.inverted_conv = ConvLayer(channels, 2 * mid, kernel=1, act=act)
        self.depth_conv = ConvLayer(2 * mid, 2 * mid, groups=2 * mid)
        self.point_conv = ConvLayer(mid, channels, kernel=1, bias=False, norm=True)
        self.gate = ACTIVATIONS[act]

    def forward(self, x_BCTHW: Tensor, shortcut: Tensor | None = None) -> Tensor:
        both_BCTHW = self.depth_conv(self.inverted_conv(x_BCTHW))
        if self.gate is F.silu:
            return self.point_conv(silu_gate(both_BCTHW), shortcut)
        value_BCTHW, gate_BCTHW = both_BCTHW.chunk(2, dim=1)
        return self.point_conv(value_BCTHW * self.gate(gate_BCTHW), shortcut)


class EViTBlock(nn.Module):
    """Linear attention, then gated convolution, each added to its input."""

    def __init__(self, channels: int, act: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.context_module = Residual(LiteMLA(channels, scales=scales))
        self.local_module = Residual(GLUMBConv(channels, act))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.local_module(self.context_module(x_BCTHW))


class DownBlock(nn.Module):
    """Strided convolution plus the averaging shortcut: [B, C, T, H, W] -> [B, out, T/ft, H/2, W/2].

    Time is halved where `temporal` says so, unless there is only one frame.
    """

    def __init__(self, in_channels: int, out_channels: int, temporal: bool) -> None:
        super().__init__()
        self.temporal, self.out_channels = temporal, out_channels
        self.main = ConvLayer(in_channels, out_channels, stride=SPACE_TIME if temporal else SPACE)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        factors = SPACE_TIME if self.temporal and x_BCTHW.shape[2] > 1 else SPACE
        return self.main(x_BCTHW) + average_shortcut(x_BCTHW, self.out_channels, factors)


class InterpolateConv(nn.Module):
    """Nearest upsampling, then a convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = ConvLayer(in_channels, out_channels)

    def forward(self, x_BCTHW: Tensor, factors: tuple[int, int, int]) -> Tensor:
        return self.conv(upsample(x_BCTHW, factors))


class UpBlock(nn.Module):
    """Upsampling convolution plus the duplicating shortcut: [B, C, T, H, W] -> [B, out, T*ft, H*2, W*2].

    Time is doubled where `temporal` says so, unless there is only one frame.
    """

    def __init__(self, in_channels: int, out_channels: int, temporal: bool) -> None:
        super().__init__()
        self.temporal = temporal
        self.main = InterpolateConv(in_channels, out_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        factors = SPACE_TIME if self.temporal and x_BCTHW.shape[2] > 1 else SPACE
        conv = self.main.conv.conv
        if kernels.usable(x_BCTHW) and conv.bias is not None:
            return upsample_conv(x_BCTHW, conv.weight, conv.bias, factors)
        return add_duplicated(self.main(x_BCTHW, factors), x_BCTHW, factors)


class EncoderProjectOut(nn.Module):
    """Convolution to the latent channels plus the mean over consecutive channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.main = OpSequential([ConvLayer(in_channels, out_channels)])

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.main(x_BCTHW) + average_shortcut(x_BCTHW, self.out_channels)


class DecoderProjectIn(nn.Module):
    """Convolution from the latent channels plus each latent channel repeated."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.main = ConvLayer(in_channels, out_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return add_duplicated(self.main(x_BCTHW), x_BCTHW)


class Activate(nn.Module):
    """An activation that holds a place in a list of modules."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class DecoderProjectOut(OpSequential):
    """Norm, activation, convolution to pixels; no clamp."""

    def __init__(self, in_channels: int, out_channels: int, act: str) -> None:
        super().__init__([RMSNorm3d(in_channels), Activate(act), ConvLayer(in_channels, out_channels)])

    @property
    def last_conv(self) -> nn.Conv3d:
        layer = self.op_list[2]
        assert isinstance(layer, ConvLayer)
        return layer.conv


def build_block(kind: str, channels: int, act: str) -> nn.Module:
    """A block of a stage by its name in the config."""
    if kind == "ResBlock":
        return Residual(ResBlockMain(channels, act))
    return EViTBlock(channels, act, scales=(5,) if kind == "EViTS5_GLU" else ())
