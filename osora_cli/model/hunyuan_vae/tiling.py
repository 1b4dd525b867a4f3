"""Temporal tiles of a causal autoencoder: each begins with one frame that only sets it off.

Shapes: B batch, C channels, T frames, H rows, W columns. Spatial tiles are those of the Video DC-AE.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from osora_cli.model.dc_ae.tiling import TIME, Coder, Cut, Read, blend


def tile_time_causal(coder: Coder, read: Read, frames: int, cut: Cut, unit: int) -> Iterator[Tensor]:
    """`coder` over tiles of `cut.length` + 1 frames; the parts of the output in order, as `tile_time` gives them.

    A causal coder gives the first frame an output of its own. In every tile but the first that output stands for a
    frame which the tile before has covered; it is dropped before blending, and the first tile keeps one more.

    Args:
        unit: frames of the input, after the first, that make one more frame of the output. A last tile with fewer
            has nothing left once its first output is dropped, and is left out.
    """
    before: Tensor | None = None
    for start in range(0, frames, cut.stride):
        end = min(start + cut.length + 1, frames)
        if before is not None and end - start <= unit:
            break
        tile = coder(read(start, end))
        if before is not None:
            tile = blend(before, tile[:, :, 1:], cut.blend, TIME)
        yield tile[:, :, : cut.keep + (before is None)]
        before = tile
