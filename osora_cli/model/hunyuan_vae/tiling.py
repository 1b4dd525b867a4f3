"""Temporal tiles of a causal autoencoder (models.md 3.5): each begins with one frame that only sets it off.

Shapes: B batch, C channels, T frames, H rows, W columns. Spatial tiles are those of the Video DC-AE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osora_cli.model.dc_ae.tiling import TIME, Coder, Cut, blend


def tile_time_causal(coder: Coder, x_BCTHW: Tensor, cut: Cut, unit: int) -> Tensor:
    """`coder` over tiles of `cut.length` + 1 frames.

    A causal coder gives the first frame an output of its own. In every tile but the first that output stands for a
    frame which the tile before has covered; it is dropped before blending, and the first tile keeps one more.

    Args:
        unit: frames of the input, after the first, that make one more frame of the output. A last tile with fewer
            has nothing left once its first output is dropped, and is left out.
    """
    frames = x_BCTHW.shape[TIME]
    parts: list[Tensor] = []
    before: Tensor | None = None
    for start in range(0, frames, cut.stride):
        end = min(start + cut.length + 1, frames)
        if before is not None and end - start <= unit:
            break
        tile = coder(x_BCTHW[:, :, start:end])
        if before is not None:
            tile = blend(before, tile[:, :, 1:], cut.blend, TIME)
        parts.append(tile[:, :, : cut.keep + (before is None)])
        before = tile
    return torch.cat(parts, dim=TIME)
