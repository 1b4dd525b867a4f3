"""Attention over the joined text and image tokens.

Shapes: B batch, L tokens, H heads, D channels of a head, E = H * D hidden width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from osora_cli.model.mmdit.rope import RopeTable, apply_rope

NORM_EPS = 1e-6

# Kernels in half precision on a GPU, the first that takes the inputs. cuDNN's, made for Hopper and later, goes second
# until it has been measured here: tests/benchmarks/train_diffusion_full.py --attention cudnn.
KERNEL_ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Orders came with torch 2.6, and torch.compile knows them from 2.8 on; before, torch chooses.
_HAS_ORDER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


class Attention(Protocol):
    """What the blocks call for attention, and the only place where tokens meet.

    All else in a block works token by token. So a rank may hold any part of the tokens, with the rows of the rope
    table that belong to them, as long as this call sees to it that every query meets every key.
    """

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor: ...


def full_attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over all tokens, without a mask: text padding takes part.

    Returns:
        `[B, L, H, D]` in the dtype of `v_BLHD`.
    """
    q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    if not takes_order(v_BHLD):
        return functional.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD).transpose(1, 2)
    # Here and not around the network: a block that is computed again in the backward pass has to choose the same.
    with sdpa_kernel(KERNEL_ORDER, set_priority=True):
        return functional.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD).transpose(1, 2)


def takes_order(x: Tensor) -> bool:
    """Whether `KERNEL_ORDER` is for attention over tensors such as `x`."""
    return _HAS_ORDER and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def rotate_and_attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, rope: RopeTable, attend: Attention) -> Tensor:
    """Turn queries and keys by their positions, attend, and join the heads: `[B, L, H * D]`."""
    return attend(apply_rope(q_BLHD, rope), apply_rope(k_BLHD, rope), v_BLHD).flatten(2)


def split_heads(x_BLE: Tensor, num_heads: int) -> Tensor:
    """`[B, L, H * D]` to `[B, L, H, D]`: the channels of a head are neighbours."""
    return x_BLE.view(*x_BLE.shape[:2], num_heads, -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis: statistics in fp32, rounded to the input's dtype before the scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), (x.shape[-1],), eps=NORM_EPS)
        return normed.to(x.dtype) * self.scale


class QKNorm(nn.Module):
    """Norms of queries and keys, each over the channels of a head, with scales of their own."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = RMSNorm(head_dim)
        self.key_norm = RMSNorm(head_dim)

    def forward(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Normed q and k in the dtype of v, which a scale of higher precision would otherwise raise."""
        return self.query_norm(q_BLHD).to(v_BLHD.dtype), self.key_norm(k_BLHD).to(v_BLHD.dtype)


class StreamAttention(nn.Module):
    """One stream's projections into and out of the joint attention of a double block."""

    def __init__(self, hidden_size: int, num_heads: int, *, qkv_bias: bool, fused_qkv: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fused_qkv = fused_qkv
        # Creation order is the order of the keys in files.
        if fused_qkv:
            self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=qkv_bias)
        else:
            self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
            self.k_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
            self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.norm = QKNorm(hidden_size // num_heads)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def project(self, x_BLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed queries and keys, and values, each `[B, L, H, D]`."""
        if self.fused_qkv:
            q_BLE, k_BLE, v_BLE = self.qkv(x_BLE).chunk(3, dim=-1)
        else:
            q_BLE, k_BLE, v_BLE = self.q_proj(x_BLE), self.k_proj(x_BLE), self.v_proj(x_BLE)
        q_BLHD, k_BLHD, v_BLHD = (split_heads(x, self.num_heads) for x in (q_BLE, k_BLE, v_BLE))
        q_BLHD, k_BLHD = self.norm(q_BLHD, k_BLHD, v_BLHD)
        return q_BLHD, k_BLHD, v_BLHD
