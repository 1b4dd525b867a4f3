"""Buffers that each rank moves by itself, such as running statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def average_buffers(module: nn.Module) -> None:
    """Make the buffers equal on all ranks: the mean of floats, the highest of whole numbers.

    In fp64, where the mean of equal values is that value to the last bit.
    """
    buffers = list(module.buffers())
    floats = [b for b in buffers if b.is_floating_point()]
    if floats:
        flat = torch.cat([b.detach().double().reshape(-1) for b in floats])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for buffer, part in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
            buffer.copy_(part.view(buffer.shape))
    for buffer in buffers:
        if not buffer.is_floating_point():
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
