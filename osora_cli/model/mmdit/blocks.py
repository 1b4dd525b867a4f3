"""The blocks of the MMDiT.

Shapes: B batch, L tokens (text, image or both), E hidden width, M width of the MLP, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osora_cli.model.mmdit.attention import (
    Attention,
    QKNorm,
    StreamAttention,
    full_attention,
    rotate_and_attend,
    split_heads,
)
from osora_cli.model.mmdit.host_buffer import HostBuffer
from osora_cli.model.mmdit.rope import RopeTable

NORM_EPS = 1e-6


def layer_norm(hidden_size: int) -> nn.LayerNorm:
    """LayerNorm without scale and shift of its own: those come from the modulation."""
    return nn.LayerNorm(hidden_size, elementwise_affine=False, eps=NORM_EPS)


def modulate(x_BLE: Tensor, shift_B1E: Tensor, scale_B1E: Tensor) -> Tensor:
    """Scale around 1, then shift; the same for all tokens of a sample."""
    return (1 + scale_B1E) * x_BLE + shift_B1E


class Modulation(nn.Module):
    """Shifts, scales and gates from the conditioning vector: a Linear of SiLU, cut into equal parts."""

    def __init__(self, hidden_size: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.silu = nn.SiLU()
        self.lin = nn.Linear(hidden_size, parts * hidden_size)

    def forward(self, vec_BE: Tensor) -> tuple[Tensor, ...]:
        """`parts` tensors `[B, 1, E]`."""
        return self.lin(self.silu(vec_BE))[:, None].chunk(self.parts, dim=-1)


def mlp(hidden_size: int, mlp_dim: int) -> nn.Sequential:
    """Linear, GELU (tanh form), Linear."""
    return nn.Sequential(nn.Linear(hidden_size, mlp_dim), nn.GELU(approximate="tanh"), nn.Linear(mlp_dim, hidden_size))


class Block(nn.Module):
    """A block that can drop its activations and compute them again in the backward pass.

    It does so inside `forward`, below the hooks that an engine puts on the block for its parameters.
    """

    recompute = False
    buffer: HostBuffer | None = None
    compiled: Callable[..., Any] | None = None
    """`compute` of the class, compiled; taken where gradients are (compiled.py)."""

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.compute(*args)
        compute = self.compute if self.compiled is None else partial(self.compiled, self)
        if self.recompute:
            # What a checkpoint keeps are its inputs, and it saves them under the hooks that are set around it.
            with self.buffer.holding() if self.buffer is not None else nullcontext():
                # Nothing in a block draws random numbers, so their state need not be kept.
                return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)
        return compute(*args)

    def compute(self, *args: Any) -> Any:
        raise NotImplementedError


class DoubleStreamBlock(Block):
    """Text and image tokens with weights of their own, joined for attention only."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_dim: int, *, qkv_bias: bool, fused_qkv: bool) -> None:
        super().__init__()
        self.img_mod = Modulation(hidden_size, 6)
        self.img_norm1 = layer_norm(hidden_size)
        self.img_attn = StreamAttention(hidden_size, num_heads, qkv_bias=qkv_bias, fused_qkv=fused_qkv)
        self.img_norm2 = layer_norm(hidden_size)
        self.img_mlp = mlp(hidden_size, mlp_dim)

        self.txt_mod = Modulation(hidden_size, 6)
        self.txt_norm1 = layer_norm(hidden_size)
        self.txt_attn = StreamAttention(hidden_size, num_heads, qkv_bias=qkv_bias, fused_qkv=fused_qkv)
        self.txt_norm2 = layer_norm(hidden_size)
        self.txt_mlp = mlp(hidden_size, mlp_dim)

    def compute(
        self, img_BLE: Tensor, txt_BLE: Tensor, vec_BE: Tensor, rope: RopeTable, attend: Attention = full_attention
    ) -> tuple[Tensor, Tensor]:
        """Image and text tokens; `rope` holds the text tokens' rows first, then the image tokens'."""
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec_BE)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec_BE)

        txt_qkv = self.txt_attn.project(modulate(self.txt_norm1(txt_BLE), txt_shift1, txt_scale1))
        img_qkv = self.img_attn.project(modulate(self.img_norm1(img_BLE), img_shift1, img_scale1))
        q_BLHD, k_BLHD, v_BLHD = (torch.cat(pair, dim=1) for pair in zip(txt_qkv, img_qkv, strict=True))
        out_BLE = rotate_and_attend(q_BLHD, k_BLHD, v_BLHD, rope, attend)
        num_text = txt_BLE.shape[1]
        txt_out_BLE, img_out_BLE = out_BLE[:, :num_text], out_BLE[:, num_text:]

        img_BLE = img_BLE + img_gate1 * self.img_attn.proj(img_out_BLE)
        img_BLE = img_BLE + img_gate2 * self.img_mlp(modulate(self.img_norm2(img_BLE), img_shift2, img_scale2))
        txt_BLE = txt_BLE + txt_gate1 * self.txt_attn.proj(txt_out_BLE)
        txt_BLE = txt_BLE + txt_gate2 * self.txt_mlp(modulate(self.txt_norm2(txt_BLE), txt_shift2, txt_scale2))
        return img_BLE, txt_BLE


class SingleStreamBlock(Block):
    """Attention and MLP side by side over the joined sequence, text first."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_dim: int, *, fused_qkv: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fused_qkv = fused_qkv
        # Creation order is the order of the keys in files.
        if fused_qkv:
            self.linear1 = nn.Linear(hidden_size, 3 * hidden_size + mlp_dim)
        else:
            self.q_proj = nn.Linear(hidden_size, hidden_size)
            self.k_proj = nn.Linear(hidden_size, hidden_size)
            self.v_mlp = nn.Linear(hidden_size, hidden_size + mlp_dim)
        self.linear2 = nn.Linear(hidden_size + mlp_dim, hidden_size)
        self.norm = QKNorm(hidden_size // num_heads)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.pre_norm = layer_norm(hidden_size)
        self.modulation = Modulation(hidden_size, 3)
        self.widths = [hidden_size, mlp_dim]

    def compute(self, x_BLE: Tensor, vec_BE: Tensor, rope: RopeTable, attend: Attention = full_attention) -> Tensor:
        shift_B1E, scale_B1E, gate_B1E = self.modulation(vec_BE)
        q_BLE, k_BLE, v_BLE, mlp_BLM = self._project(modulate(self.pre_norm(x_BLE), shift_B1E, scale_B1E))
        q_BLHD, k_BLHD, v_BLHD = (split_heads(x, self.num_heads) for x in (q_BLE, k_BLE, v_BLE))
        q_BLHD, k_BLHD = self.norm(q_BLHD, k_BLHD, v_BLHD)
        out_BLE = rotate_and_attend(q_BLHD, k_BLHD, v_BLHD, rope, attend)
        return x_BLE + gate_B1E * self.linear2(torch.cat([out_BLE, self.mlp_act(mlp_BLM)], dim=-1))

    def _project(self, x_BLE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values before heads and norm, and the MLP's hidden layer before its activation."""
        width, mlp_dim = self.widths
        if self.fused_qkv:
            q_BLE, k_BLE, v_BLE, mlp_BLM = torch.split(self.linear1(x_BLE), [width, width, width, mlp_dim], dim=-1)
        else:
            q_BLE, k_BLE = self.q_proj(x_BLE), self.k_proj(x_BLE)
            v_BLE, mlp_BLM = torch.split(self.v_mlp(x_BLE), [width, mlp_dim], dim=-1)
        return q_BLE, k_BLE, v_BLE, mlp_BLM


class LastLayer(nn.Module):
    """Modulated norm, then a Linear to the features of a token."""

    def __init__(self, hidden_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = layer_norm(hidden_size)
        self.linear = nn.Linear(hidden_size, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x_BLE: Tensor, vec_BE: Tensor) -> Tensor:
        shift_B1E, scale_B1E = self.adaLN_modulation(vec_BE)[:, None].chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x_BLE), shift_B1E, scale_B1E))
