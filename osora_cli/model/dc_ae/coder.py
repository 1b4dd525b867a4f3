"""Encoder and decoder of the Video DC-AE. Shape suffixes: B clip, C channels, T frames, H rows, W columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osora_cli.config.models.dc_ae import CoderPlan
from osora_cli.model.dc_ae.blocks import (
    DecoderProjectIn,
    DecoderProjectOut,
    DownBlock,
    EncoderProjectOut,
    OpSequential,
    UpBlock,
    build_block,
)
from osora_cli.model.dc_ae.layers import ConvLayer


def _recomputed(module: nn.Module, x_BCTHW: Tensor) -> Tensor:
    # No dropout anywhere, so no generator state to keep.
    out: Tensor = checkpoint(module, x_BCTHW, use_reentrant=False, preserve_rng_state=False)
    return out


class Encoder(nn.Module):
    """Pixels to latent: [B, C, T, H, W] -> [B, latent, T / time, H / space, W / space]."""

    def __init__(self, plan: CoderPlan, in_channels: int, latent_channels: int) -> None:
        super().__init__()
        self.grad_checkpoint = False
        self.project_in = ConvLayer(in_channels, plan.widths[0])
        stages: list[nn.Module] = []
        for i, (kind, width, depth) in enumerate(zip(plan.blocks, plan.widths, plan.depths, strict=True)):
            ops = [build_block(kind, width, plan.act) for _ in range(depth)]
            if i + 1 < len(plan.widths):
                ops.append(DownBlock(width, plan.widths[i + 1], plan.temporal[i]))
            stages.append(OpSequential(ops))
        self.stages = nn.ModuleList(stages)
        self.project_out = EncoderProjectOut(plan.widths[-1], latent_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x_BCTHW = self.project_in(x_BCTHW)
        for unit in (*self.stages, self.project_out):
            x_BCTHW = _recomputed(unit, x_BCTHW) if self.grad_checkpoint and torch.is_grad_enabled() else unit(x_BCTHW)
        return x_BCTHW


class Decoder(nn.Module):
    """Latent to pixels: [B, latent, T, H, W] -> [B, C, T * time, H * space, W * space] (T = 1 stays 1).

    Stages are stored from the largest to the smallest, as the encoder's, and run the other way round.
    """

    def __init__(self, plan: CoderPlan, out_channels: int, latent_channels: int) -> None:
        super().__init__()
        self.grad_checkpoint = False
        self.keep_last = False
        self.project_in = DecoderProjectIn(latent_channels, plan.widths[-1])
        stages: list[nn.Module] = []
        for i, (kind, width, depth) in enumerate(zip(plan.blocks, plan.widths, plan.depths, strict=True)):
            ops = [build_block(kind, width, plan.act) for _ in range(depth)]
            if i + 1 < len(plan.widths):
                ops.insert(0, UpBlock(plan.widths[i + 1], width, plan.temporal[i]))
            stages.append(OpSequential(ops))
        self.stages = nn.ModuleList(stages)
        self.project_out = DecoderProjectOut(plan.widths[0], out_channels, plan.out_act)

    def forward(self, z_BCTHW: Tensor) -> Tensor:
        x_BCTHW = z_BCTHW
        recompute = self.grad_checkpoint and torch.is_grad_enabled()
        for unit in (self.project_in, *reversed(self.stages)):
            x_BCTHW = _recomputed(unit, x_BCTHW) if recompute else unit(x_BCTHW)
        if recompute and not self.keep_last:
            return _recomputed(self.project_out, x_BCTHW)
        return self.project_out(x_BCTHW)
