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
from osora_cli.metrics.psnr import psnr, psnr_from_mse

Grid = tuple[int, int, int]

_SLACK = 1e-9  # counts of boxes may be fractions, and their quotients a hair above a whole number
_EXCESS = 1.05  # how many more boxes than wanted a grid may have


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


def _cells(length: int, count: int, device: torch.device) -> torch.Tensor:
    """Which of `count` cells each of `length` places falls into: `[length]`, cells equal to within one place."""
    return torch.arange(length, device=device) * count // length


def _mean_along(video: torch.Tensor, axis: int, cell: torch.Tensor, count: int) -> torch.Tensor:
    shape = list(video.shape)
    shape[axis] = count
    sums = video.new_zeros(shape).index_add_(axis, cell, video)
    sizes = torch.bincount(cell, minlength=count).to(video.dtype)
    return sums / sizes.view([-1 if i == axis else 1 for i in range(video.dim())])


def block_means(video: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Replace each box of a grid by its mean colour.

    Place i of n falls into cell `floor(i * cells / n)`, so boxes tile the clip at any size; the mean over a box is the
    constant with the least squared error there.

    Args:
        video: `[B, C, T, H, W]` or `[T, C, H, W]` float.
        grid: boxes along time, height and width, each from 1 to the length of its axis.

    Returns:
        `[B, C, T, H, W]` float64.

    Raises:
        ValueError: the grid has more boxes on an axis than places, or none.
    """
    out = as_clips(video).double()
    if any(not 1 <= cells <= length for cells, length in zip(grid, out.shape[2:], strict=True)):
        raise ValueError(f"grid {grid} does not fit a clip of {tuple(out.shape[2:])} (frames, rows, columns)")
    # A box is a product of intervals, so its mean is the mean of means along one axis after the other.
    cells = {axis: _cells(out.shape[axis], count, out.device) for axis, count in enumerate(grid, start=2)}
    for axis, count in enumerate(grid, start=2):
        out = _mean_along(out, axis, cells[axis], count)
    for axis, cell in cells.items():
        out = out.index_select(axis, cell)
    return out


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
    best: list[BlockMeans] = []
    for grid in block_grids(clips.shape[2:], boxes):
        scores = psnr(clips.double(), block_means(clips, grid), data_range).tolist()
        found = [BlockMeans(score, grid, clips.shape[1] * prod(grid)) for score in scores]
        best = [max(pair, key=lambda b: b.psnr) for pair in zip(best, found, strict=True)] if best else found
    return best
