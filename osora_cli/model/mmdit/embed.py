"""Embeddings of scalars and vectors that condition the whole sequence.

Shapes: B batch, F features of the sinusoid, C channels in, E hidden width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TIME_FACTOR = 1000.0
MAX_PERIOD = 10000.0


def timestep_embedding(t_B: Tensor, dim: int) -> Tensor:
    """Sinusoids of a scalar in [0, 1]: cos and sin of 1000 t * 10000^(-j / half), j = 0 .. half - 1.

    The product is taken in fp32 whatever the dtype of `t_B`: bfloat16 would round 1000 t to steps of 4 above 512.

    Returns:
        `[B, dim]` in the dtype of `t_B`: half cosines, half sines, and a zero where `dim` is odd.
    """
    half = dim // 2
    index_F = torch.arange(half, dtype=torch.float32, device=t_B.device)
    frequency_F = torch.exp(-math.log(MAX_PERIOD) / half * index_F)
    angle_BF = (TIME_FACTOR * t_B.float())[:, None] * frequency_F
    embedding_BF = torch.cat([angle_BF.cos(), angle_BF.sin()], dim=-1)
    return functional.pad(embedding_BF, (0, dim % 2)).to(t_B.dtype)


class MLPEmbedder(nn.Module):
    """Linear, SiLU, Linear: `[B, C]` to `[B, E]`."""

    def __init__(self, in_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden_dim)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.out_layer(self.silu(self.in_layer(x_BC)))
