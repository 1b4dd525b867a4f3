"""Rotary position embedding over (frame, row, column), in the two channel layouts in use.

Shapes: B batch, L tokens, A axes, H heads, D channels of a head, K = D / 2 rotation angles.

A head's K channel pairs (u, v) turn by angles a: u' = u cos a - v sin a, v' = v cos a + u sin a. The layouts differ
in which channels make a pair, so weights trained for one are wrong for the other (convert.py permutes them):

* interleaved: pair k is channels (2k, 2k + 1). FLUX.1. Angles in fp64, rounded to fp32 after cos and sin.
* half: pair k is channels (k, k + K). The released video weights ("liger"). Angles in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RopeTable:
    """Cosine and sine of every token's rotation angles.

    A plain class on purpose: FSDP2 casts the tensors among a block's arguments to the compute dtype, and looks for
    them in tuples, dicts and dataclasses, too.

    Attributes:
        cos_BLK: fp32 cosines, the axes' angles one after the other.
        sin_BLK: fp32 sines.
        interleaved: which channels make a pair, see above.
    """

    def __init__(self, cos_BLK: Tensor, sin_BLK: Tensor, *, interleaved: bool) -> None:
        self.cos_BLK = cos_BLK
        self.sin_BLK = sin_BLK
        self.interleaved = interleaved


def rope_table(ids_BLA: Tensor, axes_dim: Sequence[int], theta: float, *, interleaved: bool) -> RopeTable:
    """Angles of axis n with D_n channels: id_n * theta^(-2k / D_n) for k = 0 .. D_n / 2 - 1.

    Su et al. 2021 (arXiv:2104.09864).

    Args:
        ids_BLA: position ids `[B, L, A]`, integers or fp32; half precision is exact only up to 256.
        axes_dim: channels of a head for each axis; even, adding up to the head's.
        theta: base of the frequencies.
        interleaved: the channel layout that the table is for; it decides the precision of the angles.
    """
    dtype = torch.float64 if interleaved else torch.float32
    angles = []
    for axis, dim in enumerate(axes_dim):
        exponent_K = torch.arange(0, dim, 2, dtype=dtype, device=ids_BLA.device) / dim
        # Products, no einsum or matmul: autocast would run those in half precision.
        angles.append(ids_BLA[..., axis, None].to(dtype) * theta**-exponent_K)
    angles_BLK = torch.cat(angles, dim=-1)
    return RopeTable(angles_BLK.cos().float(), angles_BLK.sin().float(), interleaved=interleaved)


def apply_rope(x_BLHD: Tensor, table: RopeTable) -> Tensor:
    """Rotate queries or keys by their tokens' angles, in fp32; returns the dtype that came in."""
    cos_BL1K, sin_BL1K = table.cos_BLK.unsqueeze(2), table.sin_BLK.unsqueeze(2)
    if table.interleaved:
        u_BLHK, v_BLHK = x_BLHD.float().view(*x_BLHD.shape[:3], -1, 2).unbind(-1)
    else:
        u_BLHK, v_BLHK = x_BLHD.float().chunk(2, dim=-1)
    rotated = (u_BLHK * cos_BL1K - v_BLHK * sin_BL1K, v_BLHK * cos_BL1K + u_BLHK * sin_BL1K)
    out_BLHD = torch.stack(rotated, dim=-1).flatten(-2) if table.interleaved else torch.cat(rotated, dim=-1)
    return out_BLHD.to(x_BLHD.dtype)
