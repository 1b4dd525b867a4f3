"""Encoder and decoder of the HunyuanVideo VAE.

Shapes: B batch, C channels, T frames, H rows, W columns. Modules are declared in the order of the released keys,
which is not the order they run in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig, strides
from osora_cli.model.hunyuan_vae.layers import NORM_EPS, CausalConv3d, Downsample, MidBlock, Resnet, Upsample, carried
from osora_cli.model.precision import autocast, autocast_is_on


class _Block(nn.Module):
    """Resnets and perhaps a re-sampler, under the released keys."""

    def __init__(self, resnets: list[Resnet], name: str, resampler: nn.Module | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)
        if resampler is not None:
            self.add_module(name, nn.ModuleList([resampler]))

    def units(self) -> list[nn.Module]:
        """What the block runs, in order."""
        return [unit for group in self.children() if isinstance(group, nn.ModuleList) for unit in group]


def _resnets(in_channels: int, out_channels: int, count: int, config: HunyuanVaeConfig) -> list[Resnet]:
    widths = [in_channels] + [out_channels] * count
    return [Resnet(a, b, config.norm_num_groups, config.dropout) for a, b in pairwise(widths)]


def _blocks(blocks: nn.ModuleList) -> list[_Block]:
    return [block for block in blocks if isinstance(block, _Block)]


def unrounded(x: Tensor, weight: Tensor) -> AbstractContextManager[object]:
    """A block in which autocast is off, where weights and input are fp32; else it changes nothing."""
    kind = x.device.type
    exact = x.dtype == weight.dtype == torch.float32
    on = autocast_is_on(kind) and not exact
    return autocast(kind, torch.get_autocast_dtype(kind) if on else None, enabled=on)


class _Coder(nn.Module):
    """What both halves share: running units with or without gradient checkpointing, and the tail."""

    conv_norm_out: nn.GroupNorm
    conv_out: CausalConv3d
    grad_checkpoint = False

    def run(self, unit: Callable[[Tensor], Tensor], x_BCTHW: Tensor) -> Tensor:
        if self.grad_checkpoint and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(unit, x_BCTHW, use_reentrant=False)
            return recomputed
        return unit(x_BCTHW)

    def tail(self, x_BCTHW: Tensor) -> Tensor:
        return self.conv_out(self.run(lambda x: F.silu(self.conv_norm_out(carried(x))), x_BCTHW))


class Encoder(_Coder):
    """Clips [B, 3, T, H, W] to moments [B, 2 * latent channels, t, h, w] (before `quant_conv`)."""

    def __init__(self, config: HunyuanVaeConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        self.conv_in = CausalConv3d(config.in_channels, widths[0])
        self.down_blocks = nn.ModuleList()
        for width_in, width, stride in zip([widths[0], *widths], widths, strides(config), strict=False):
            resample = Downsample(width, stride) if max(stride) > 1 else None
            resnets = _resnets(width_in, width, config.layers_per_block, config)
            self.down_blocks.append(_Block(resnets, "downsamplers", resample))
        self.mid_block = MidBlock(widths[-1], config.norm_num_groups, config.mid_block_add_attention, config.dropout)
        self.conv_norm_out = nn.GroupNorm(config.norm_num_groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x_BCTHW = self.conv_in(x_BCTHW)
        for block in _blocks(self.down_blocks):
            for unit in block.units():
                x_BCTHW = self.run(unit, x_BCTHW)
        with unrounded(x_BCTHW, self.conv_out.conv.weight):
            return self.tail(self.run(self.mid_block, x_BCTHW))


class Decoder(_Coder):
    """Latents [B, latent channels, t, h, w] (after `post_quant_conv`) to clips [B, 3, 1 + ratio*(t-1), H, W]."""

    def __init__(self, config: HunyuanVaeConfig) -> None:
        super().__init__()
        widths = config.block_out_channels[::-1]
        self.conv_in = CausalConv3d(config.latent_channels, widths[0])
        self.up_blocks = nn.ModuleList()
        # Block i enlarges by what the encoder's block i divides by: the rule counts from the front on both sides.
        for width_in, width, factor in zip([widths[0], *widths], widths, strides(config), strict=False):
            resample = Upsample(width, factor) if max(factor) > 1 else None
            resnets = _resnets(width_in, width, config.layers_per_block + 1, config)
            self.up_blocks.append(_Block(resnets, "upsamplers", resample))
        self.mid_block = MidBlock(widths[0], config.norm_num_groups, config.mid_block_add_attention, config.dropout)
        self.conv_norm_out = nn.GroupNorm(config.norm_num_groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels)

    def forward(self, z_BCTHW: Tensor) -> Tensor:
        blocks = _blocks(self.up_blocks)
        # Up to the first enlargement (and, in the encoder, after the last reduction): a twentieth of the work, and
        # half of what bf16 would lose.
        with unrounded(z_BCTHW, self.conv_in.conv.weight):
            x_BCTHW = self.run(self.mid_block, self.conv_in(z_BCTHW))
            for unit in blocks[0].units():
                x_BCTHW = self.run(unit, x_BCTHW)
        for block in blocks[1:]:
            for unit in block.units():
                x_BCTHW = self.run(unit, x_BCTHW)
        return self.tail(x_BCTHW)
