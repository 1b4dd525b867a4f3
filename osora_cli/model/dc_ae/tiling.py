"""Encode or decode in overlapping tiles that are blended where they meet.

Shape suffixes: B clip, C channels, T frames, H rows, W columns. Each tile is blended with the one before it on the
same axis, as that one is after its own blending and before it is cut; rows before columns, space before time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osora_cli.config.models.dc_ae import TileAxis

Coder = Callable[[Tensor], Tensor]
Read = Callable[[int, int], Tensor]  # frames start .. end of the input, [B, C, end - start, H, W]
TIME, ROWS, COLUMNS = 2, 3, 4


@dataclass(frozen=True)
class Cut:
    """One axis of one direction: input is cut by `length` and `stride`, output blended over `blend`, `keep` stays."""

    length: int
    stride: int
    blend: int
    keep: int

    @classmethod
    def encoding(cls, axis: TileAxis) -> Cut:
        """Cuts pixels or frames, blends latents."""
        return cls(axis.latent * axis.ratio, axis.stride * axis.ratio, axis.overlap, axis.stride)

    @classmethod
    def decoding(cls, axis: TileAxis) -> Cut:
        """Cuts latents, blends pixels or frames."""
        return cls(axis.latent, axis.stride, axis.overlap * axis.ratio, axis.stride * axis.ratio)

    def spans(self, size: int, least: int = 1) -> list[tuple[int, int]]:
        """(start, end) of each tile of an axis of `size`; the last may be shorter, but not below `least`.

        A last tile below `least` is left out and its forerunner goes on to the end: with an overlap that one covers
        the end already, without one it is longer by less than `least`.
        """
        starts = list(range(0, size, self.stride))
        if len(starts) > 1 and size - starts[-1] < least:
            starts.pop()
        ends = [min(start + self.length, size) for start in starts]
        ends[-1] = size
        return list(zip(starts, ends, strict=True))


def blend(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """`tile` with its first positions along `dim` faded in over the last ones of `before`.

    Over e = min(both lengths, extent) positions, position y is before * (1 - y/e) + tile * y/e.
    """
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if extent == 0:
        return tile
    shape = [1] * tile.ndim
    shape[dim] = extent
    share = (torch.arange(extent, device=tile.device, dtype=torch.float32) / extent).to(tile.dtype).view(shape)
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    faded = torch.lerp(tail, tile.narrow(dim, 0, extent), share)
    return torch.cat([faded, tile.narrow(dim, extent, tile.shape[dim] - extent)], dim=dim)


def tile_space(coder: Coder, x_BCTHW: Tensor, cut: Cut) -> Tensor:
    """`coder` over tiles of rows and columns."""
    rows: list[Tensor] = []
    above: list[Tensor] = []
    for top, bottom in cut.spans(x_BCTHW.shape[ROWS]):
        row: list[Tensor] = []
        for left, right in cut.spans(x_BCTHW.shape[COLUMNS]):
            tile = coder(x_BCTHW[..., top:bottom, left:right])
            if above:
                tile = blend(above[len(row)], tile, cut.blend, ROWS)
            if row:
                tile = blend(row[-1], tile, cut.blend, COLUMNS)
            row.append(tile)
        rows.append(torch.cat([tile[..., : cut.keep, : cut.keep] for tile in row], dim=COLUMNS))
        above = row
    return torch.cat(rows, dim=ROWS)


def tile_time(coder: Coder, read: Read, frames: int, cut: Cut, least: int) -> Iterator[Tensor]:
    """`coder` over tiles of `frames` frames, none shorter than `least`.

    Gives the parts of the output in order, each as soon as nothing changes it any more: no more than two tiles are
    held at a time, so that a clip of any length has room.
    """
    before: Tensor | None = None
    spans = cut.spans(frames, least)
    for number, (start, end) in enumerate(spans, 1):
        tile = coder(read(start, end))
        if before is not None:
            tile = blend(before, tile, cut.blend, TIME)
        before = tile
        yield tile if number == len(spans) else tile[:, :, : cut.keep]


def reader(x_BCTHW: Tensor) -> Read:
    """A clip that is in memory."""
    return lambda start, end: x_BCTHW[:, :, start:end]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts that follow each other in time, as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=TIME)
