"""What a clip's numbers are worth without learning: yardsticks for an autoencoder's PSNR.

Two approximations of a clip, both the best of their kind in the squared error:
- one constant colour for the whole clip (3 numbers);
- block means: the clip is cut into a grid of boxes, each of which gets its mean colour (3 numbers a box), and is drawn
  back as boxes of that colour (nearest neighbour: no interpolation). The grid has as many numbers as the latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, prod, sqrt

import torch

from osora_cli.metrics.clips import as_clips, check_range
from osora_cli.metrics.psnr import psnr_from_mse

Grid = tuple[int, int, int]

_SLACK = 1e-9  # counts of boxes may be fractions, and their quotients a hair above a whole number
_EXCESS = 1.05  # how many more boxes than wanted a grid may have
_CACHED = 2**22  # elements taken to float64 at a time


@dataclass(frozen=True)
class BlockMeans:
    """PSNR of one clip drawn as block means.

    Attributes:
        psnr: in dB.
        grid: boxes along time, height and width.
        numbers: numbers that describe the clip, channels times boxes.
    """

    psnr: float
    grid: Grid
    numbers: int


def constant_colour_psnr(video: torch.Tensor, data_range: float) -> torch.Tensor:
    """PSNR of each clip against its best constant colour: the mean of each channel over the whole clip.

    Args:
        video: `[B, C, T, H, W]` or `[T, C, H, W]` float.
        data_range: 1 for values in [0, 1], 2 for [-1, 1].

    Returns:
        `[B]` float64 in dB.
    """
    clips = as_clips(video).double()
    mean = clips.mean((2, 3, 4), keepdim=True)
    return psnr_from_mse((clips - mean).square().mean((1, 2, 3, 4)), data_range)


def _edges(length: int, cells: int) -> list[int]:
    """First place of each cell, and the end: place i is in cell `floor(i * cells / length)`."""
    return [-(-cell * length // cells) for cell in range(cells + 1)]


def _running(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Running sums along an axis, from 0: one longer than `x` there."""
    start = torch.zeros_like(x.narrow(axis, 0, 1))
    return torch.cat([start, x.cumsum(axis)], dim=axis)


def _cell_sums(running: torch.Tensor, axis: int, cells: int) -> torch.Tensor:
    """Sums over each cell of an axis from its running sums: the cost does not depend on the size of the cells."""
    edges = torch.tensor(_edges(running.shape[axis] - 1, cells), device=running.device)
    return running.index_select(axis, edges).diff(dim=axis)


def block_mean_mse(video: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Mean squared error of each clip when each box of a grid is drawn in its mean colour, for several grids.

    Place i of n on an axis falls into cell `floor(i * cells / n)`, so boxes tile the clip at any size. The mean over a
    box is the constant with the least squared error there, and that error is the mean square less the squared mean.

    Args:
        video: `[B, C, T, H, W]` or `[T, C, H, W]` float.
        grids: boxes along time, height and width, each from 1 to the length of its axis.

    Returns:
        `[grids, B]` float64.

    Raises:
        ValueError: a grid has more boxes on an axis than places, or none.
    """
    clips = as_clips(video)
    batch, channels, frames, height, width = clips.shape
    for grid in grids:
        if any(not 1 <= cells <= length for cells, length in zip(grid, clips.shape[2:], strict=True)):
            raise ValueError(f"grid {grid} does not fit a clip of {(frames, height, width)} (frames, rows, columns)")
    squares = torch.zeros(batch, dtype=torch.float64, device=clips.device)
    by_rows: list[list[torch.Tensor]] = [[] for _ in grids]
    # A few frames at a time, so that there is no float64 copy of the clip.
    for part in torch.split(clips, max(1, _CACHED // (batch * channels * height * width)), dim=2):
        exact = part.double()
        squares += exact.square().sum((1, 2, 3, 4))
        along_columns = _running(exact, 4)
        for found, (_, rows, columns) in zip(by_rows, grids, strict=True):
            found.append(_cell_sums(_running(_cell_sums(along_columns, 4, columns), 3), 3, rows))
    errors = []
    for found, grid in zip(by_rows, grids, strict=True):
        sums = _cell_sums(_running(torch.cat(found, dim=2), 2), 2, grid[0])
        t, h, w = (
            torch.tensor(_edges(length, cells), device=clips.device).diff().to(sums)
            for length, cells in zip(clips.shape[2:], grid, strict=True)
        )
        sizes = t[:, None, None] * h[:, None] * w
        rest = squares - (sums.square() / sizes).sum((1, 2, 3, 4))
        # What is left of a difference of equal numbers is rounding.
        errors.append(torch.where(rest > 1e-11 * squares, rest, 0) / clips[0].numel())
    return torch.stack(errors)


def _squarest(height: int, width: int, wanted: float) -> tuple[int, int]:
    """Rows and columns of at least `wanted` boxes in a frame: as few as roundings allow, then as square as may be."""
    choices = {(height, width)}
    rows, columns = sqrt(wanted * height / width), sqrt(wanted * width / height)
    for h in (floor(rows), ceil(rows)):
        h = min(max(h, 1), height)
        choices.add((h, min(max(ceil(wanted / h - _SLACK), 1), width)))
    for w in (floor(columns), ceil(columns)):
        w = min(max(w, 1), width)
        choices.add((min(max(ceil(wanted / w - _SLACK), 1), height), w))
    enough = [c for c in choices if c[0] * c[1] >= wanted - _SLACK] or [(height, width)]
    return min(enough, key=lambda c: (c[0] * c[1], abs(c[0] / height - c[1] / width), c))


def block_grids(size: Sequence[int], boxes: float) -> list[Grid]:
    """Grids of at least `boxes` boxes and as few more as possible, one for each way to cut time.

    For each number of boxes in time that divides the frames, rows and columns are cut so that boxes are as square as
    may be: of the roundings of `sqrt(boxes / t * H / W)` and `sqrt(boxes / t * W / H)` the one with the smallest
    product that is still enough. Of these grids, those remain that have at most 5 % more boxes than wanted, or the
    one with the fewest where none has. Where a clip has fewer places than boxes, the grid is the pixels themselves.

    Args:
        size: frames, rows and columns of the clip.
        boxes: how many are wanted; need not be a whole number.
    """
    frames, height, width = size
    cuts = [t for t in range(1, frames + 1) if frames % t == 0]
    grids = [(t, *_squarest(height, width, boxes / t)) for t in cuts]
    enough = [g for g in grids if prod(g) >= boxes - _SLACK] or [(frames, height, width)]
    fewest = min(prod(g) for g in enough)
    return [g for g in enough if prod(g) <= max(fewest, _EXCESS * boxes)]


def block_mean_psnr(video: torch.Tensor, latent_shape: Sequence[int], data_range: float) -> list[BlockMeans]:
    """PSNR of each clip drawn as block means with as many numbers as its latent.

    Rule: a latent of `c x t x h x w` holds N numbers, so N / C boxes of C numbers each (C: channels of the video). Of
    the grids that `block_grids` names for that count (never fewer numbers than the latent, hardly ever more) each
    clip takes the one with the highest PSNR: the yardstick may choose between time and space.

    Args:
        video: `[B, C, T, H, W]` or `[T, C, H, W]` float.
        latent_shape: the latent of one clip, without the batch axis.
        data_range: 1 for values in [0, 1], 2 for [-1, 1].

    Returns:
        One entry a clip.
    """
    clips = as_clips(video)
    check_range(data_range)
    boxes = prod(latent_shape) / clips.shape[1]
    grids = block_grids(clips.shape[2:], boxes)
    errors, choice = block_mean_mse(clips, grids).min(dim=0)
    return [
        BlockMeans(score, grids[number], clips.shape[1] * prod(grids[number]))
        for score, number in zip(psnr_from_mse(errors, data_range).tolist(), choice.tolist(), strict=True)
    ]
