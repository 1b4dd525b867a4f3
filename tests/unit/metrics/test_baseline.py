from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F

from osora_cli.metrics.baseline import block_grids, block_mean_mse, block_mean_psnr, constant_colour_psnr
from osora_cli.metrics.psnr import psnr


def test_no_constant_colour_is_better_than_the_one_scored() -> None:
    video = torch.rand(2, 3, 4, 8, 8) ** 2
    best = constant_colour_psnr(video, 1.0)
    mean = video.mean((2, 3, 4), keepdim=True).expand_as(video)
    torch.testing.assert_close(best, psnr(video, mean, 1.0), atol=1e-5, rtol=0)
    for shift in (-0.05, 0.05):
        assert (psnr(video, mean + shift, 1.0) < best).all()


def test_each_clip_has_its_own_colour() -> None:
    video = torch.rand(2, 3, 4, 8, 8)
    together = constant_colour_psnr(video, 1.0)
    alone = torch.cat([constant_colour_psnr(video[i : i + 1], 1.0) for i in range(2)])
    torch.testing.assert_close(together, alone)


def test_blocks_that_divide_are_average_pooling_drawn_with_nearest() -> None:
    video = torch.rand(2, 3, 8, 12, 16)
    drawn = F.interpolate(F.avg_pool3d(video.double(), (4, 3, 2)), scale_factor=(4, 3, 2), mode="nearest")
    expected = (video.double() - drawn).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(block_mean_mse(video, [(2, 4, 8)])[0], expected, atol=1e-12, rtol=1e-9)


def drawn_box_by_box(video: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """The definition, with loops: place i of n falls into cell i * cells // n."""
    out = video.double().clone()
    cells = [[i * count // n for i in range(n)] for n, count in zip(video.shape[2:], grid, strict=True)]
    for box in product(*(range(count) for count in grid)):
        t, h, w = (torch.tensor([c == k for c in axis]).nonzero() for axis, k in zip(cells, box, strict=True))
        place = (slice(None), slice(None), t[:, :, None], h[None, :, 0, None], w[None, None, :, 0])
        out[place] = out[place].mean((2, 3, 4), keepdim=True)
    return out


@pytest.mark.parametrize("grid", [(2, 3, 4), (5, 7, 11), (1, 1, 1), (3, 1, 5)])
def test_blocks_that_do_not_divide_still_tile_the_clip(grid: tuple[int, int, int]) -> None:
    video = torch.rand(2, 3, 5, 7, 11)
    expected = (video.double() - drawn_box_by_box(video, grid)).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(block_mean_mse(video, [grid])[0], expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("grid", [(0, 1, 1), (6, 1, 1), (1, 8, 1), (1, 1, 12)])
def test_a_grid_that_does_not_fit_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        block_mean_mse(torch.rand(1, 3, 5, 7, 11), [(1, 1, 1), grid])


@pytest.mark.parametrize("size", [(16, 64, 64), (16, 64, 192), (16, 192, 64), (1, 64, 64), (7, 33, 50)])
@pytest.mark.parametrize("numbers", [3, 100, 768, 2048, 4097])
def test_grids_have_as_many_numbers_as_the_latent_and_few_more(size: tuple[int, int, int], numbers: int) -> None:
    grids = block_grids(size, numbers / 3)
    assert grids
    for grid in grids:
        assert all(1 <= cells <= length for cells, length in zip(grid, size, strict=True))
        assert size[0] % grid[0] == 0
        if prod(grid) < prod(size):
            assert 3 * prod(grid) >= numbers
    assert max(3 * prod(g) for g in grids) <= max(1.05 * numbers, numbers + 3 * max(size))


def test_boxes_are_near_squares_on_wide_and_tall_clips() -> None:
    for size in ((16, 64, 192), (16, 192, 64)):
        for _, rows, columns in block_grids(size, 16 * 48):
            assert 0.5 < (size[1] / rows) / (size[2] / columns) < 2


def test_a_latent_as_large_as_the_clip_is_lossless() -> None:
    video = torch.rand(2, 3, 4, 8, 8)
    for found in block_mean_psnr(video, (48, 1, 4, 4), 1.0):
        assert found.psnr == float("inf")
        assert found.numbers == video[0].numel()


def test_still_clips_cut_space_and_flat_clips_cut_time() -> None:
    still = torch.rand(1, 3, 1, 32, 32).expand(1, 3, 8, 32, 32)
    flat = torch.rand(1, 3, 8, 1, 1).expand(1, 3, 8, 32, 32)
    numbers = (12, 2, 4, 4)
    (of_still,), (of_flat,) = (block_mean_psnr(v, numbers, 1.0) for v in (still, flat))
    assert of_still.grid[0] == 1
    assert of_flat.grid[0] == 8
    assert of_flat.psnr == float("inf")


def test_more_numbers_are_worth_more_and_never_less_than_one_colour() -> None:
    video = F.interpolate(torch.rand(1, 3, 4, 8, 8), size=(8, 32, 32), mode="trilinear")
    scores = [block_mean_psnr(video, (n,), 1.0)[0].psnr for n in (3, 96, 768, 3072)]
    assert scores == sorted(scores)
    assert scores[0] == pytest.approx(constant_colour_psnr(video, 1.0).item(), abs=1e-9)
    together = block_mean_psnr(torch.cat([video, video.flip(2)]), (768,), 1.0)
    assert together[0] == block_mean_psnr(video, (768,), 1.0)[0]
