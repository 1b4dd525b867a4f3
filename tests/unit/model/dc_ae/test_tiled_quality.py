"""Tiles against the whole clip, with a net trained here on a real clip: as good a picture, and no seams.

An untrained net would prove nothing: its blocks are near the identity and hardly look beyond a pixel. Each net learns
one clip, from windows of it, until it gives it back at 22 dB or more.

A border of tiles is two lines on each axis: where a tile begins to fade in, and where its forerunner, whose last
pixels saw zeros instead of their neighbours, is gone. The step across a line is the mean absolute difference of the
pixels on its two sides. It is measured on the picture, which is what one sees, and on the error of the picture, where
the clip's own edges are gone. The eye is keenest for a step that keeps its sign along a whole line, however small, and
that is measured on the difference of tiled and untiled, in grey levels.

Shape suffixes: B clip, C channels, T frames, H rows, W columns, L lines between neighbours on one axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from support.clips import real_clip
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig, TileAxis
from osora_cli.data.media import read_frames
from osora_cli.data.transforms import resize_crop_video
from osora_cli.metrics.psnr import psnr
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.padding import reconstruct_any_size
from osora_cli.model.dc_ae.tiling import Cut
from osora_cli.trainer.numerics import subnormals_flushed

OWN_DB, BETWEEN_DB = 22.0, 35.0
LARGEST_SEAM = 2.0
LARGEST_LEVEL = 1.0
TIME, ROWS, COLUMNS = 2, 3, 4


@dataclass(frozen=True)
class Recipe:
    """A net and what it learns; a window of the clip is (frames, pixels of its edges)."""

    clip: str
    size: tuple[int, int, int]
    widths: tuple[int, ...]
    blocks: tuple[str, ...]
    temporal: tuple[bool, ...]
    latent: int
    updates: int
    window: tuple[int, int] = (8, 32)
    batch: int = 4


@dataclass(frozen=True)
class Tiles:
    """Settings of a tiling; None: not on this axis."""

    space: int | None
    time: int | None
    overlap: float

    def settings(self) -> dict[str, object]:
        return {
            "use_spatial_tiling": self.space is not None,
            "use_temporal_tiling": self.time is not None,
            "spatial_tile_size": self.space or 256,
            "temporal_tile_size": self.time or 32,
            "tile_overlap_factor": self.overlap,
        }


SMALL = Recipe(
    "carphone_pristine", (38, 80, 112), (16, 32), ("ResBlock", "ResBlock"), (True, False), latent=8, updates=160
)
LARGE = {
    "residual": Recipe(
        "bigbuckbunny", (38, 96, 160), (16, 32), ("ResBlock", "ResBlock"), (True, False), latent=8, updates=400
    ),
    "attention": Recipe(
        "carphone_pristine", (38, 96, 128), (16, 32), ("ResBlock", "EViT_GLU"), (True, False), latent=8, updates=250
    ),
    "deep": Recipe(
        "carphone_pristine", (52, 96, 128), (16, 32, 64), ("ResBlock", "ResBlock", "EViTS5_GLU"), (True, True, False),
        latent=32, updates=500, window=(16, 32), batch=3,
    ),
}  # fmt: skip
# The deeper the net, the further in the border of a tile reaches, and the larger tile and overlap have to be.
LARGE_TILES = {
    "residual": [
        Tiles(64, 16, 0.25), Tiles(32, 16, 0.25), Tiles(32, 8, 0.5), Tiles(48, 24, 1 / 3), Tiles(16, None, 0.5),
        Tiles(None, 8, 0.5),
    ],
    "attention": [
        Tiles(64, 16, 0.25), Tiles(32, 16, 0.25), Tiles(64, 12, 0.5), Tiles(48, None, 1 / 3), Tiles(None, 16, 0.25),
    ],
    "deep": [
        Tiles(64, 32, 0.25), Tiles(64, 24, 0.5), Tiles(64, None, 0.25), Tiles(48, None, 1 / 3), Tiles(None, 32, 0.25),
        Tiles(None, 24, 1 / 3),
    ],
}  # fmt: skip


def read_clip(recipe: Recipe) -> Tensor:
    """[1, 3, T, H, W] in [-1, 1], from the start of the clip."""
    frames, height, width = recipe.size
    pixels = torch.from_numpy(read_frames(real_clip(recipe.clip), range(frames))).permute(0, 3, 1, 2)
    return resize_crop_video(pixels, (height, width)).transpose(0, 1).unsqueeze(0).contiguous()


@contextmanager
def quick_arithmetic() -> Iterator[None]:
    """One thread, and subnormal numbers taken as 0, without which a training takes five times as long.

    The slope of SiLU far below 0 is such a number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with subnormals_flushed():
            yield
    finally:
        torch.set_num_threads(threads)


@cache
def trained(recipe: Recipe) -> tuple[DcAe, Tensor, Tensor]:
    """The net, untiled, with the clips [2, 3, T, H, W] (the clip and its mirror image) and its reconstructions."""
    side = {"width_list": recipe.widths, "depth_list": [1] * len(recipe.widths), "block_type": recipe.blocks}
    model = DcAe(
        DcAeConfig.model_validate(
            {
                "latent_channels": recipe.latent,
                "encoder": {**side, "temporal_downsample": recipe.temporal},
                "decoder": {**side, "temporal_upsample": recipe.temporal},
            }
        )
    )
    model.reset_parameters(seed=0)
    clip = read_clip(recipe)
    with quick_arithmetic():
        train(model, clip[0], recipe)
        # Two clips at once: a single one takes torch's slow convolution.
        clips = torch.cat([clip, clip.flip(COLUMNS)])
        with torch.no_grad():
            whole = model(clips)[0]
    return model, clips, whole


def train(model: DcAe, clip_CTHW: Tensor, recipe: Recipe) -> None:
    """L1 on windows drawn from the clip; the rate rises over 20 updates and falls over the last two fifths."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0)
    lengths = (recipe.window[0], recipe.window[1], recipe.window[1])
    for update in range(1, recipe.updates + 1):
        windows = []
        for _ in range(recipe.batch):
            window = clip_CTHW
            for dim, length in enumerate(lengths, 1):
                start = int(torch.randint(window.shape[dim] - length + 1, (1,), generator=generator))
                window = window.narrow(dim, start, length)
            windows.append(window)
        x_BCTHW = torch.stack(windows)
        rate = 3e-3 * min(1, update / 20, max(0.02, (recipe.updates - update) / (0.4 * recipe.updates)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = (model(x_BCTHW)[0] - x_BCTHW).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def in_tiles(model: DcAe, tiles: Tiles) -> DcAe:
    tiled = DcAe(model.config.model_copy(update=tiles.settings()))
    tiled.load_state_dict(model.state_dict())
    return tiled


def step_at_lines(x_BCTHW: Tensor, dim: int) -> Tensor:
    """[L] mean absolute difference across each line; line i lies between positions i and i + 1."""
    others = [axis for axis in range(5) if axis != dim]
    return x_BCTHW.diff(dim=dim).abs().mean(others)


def border_lines(axis: TileAxis, size: int) -> Tensor:
    """[L] bool: where a tile begins to fade in, and where its forerunner has gone."""
    starts = [start for start, _ in Cut.encoding(axis).spans(size)][1:]
    ends = [start + axis.overlap * axis.ratio for start in starts]
    lines = torch.zeros(size - 1, dtype=torch.bool)
    lines[[at - 1 for at in {*starts, *ends} if at < size]] = True
    return lines


def cut_axes(tiled: DcAe, x_BCTHW: Tensor) -> list[tuple[int, TileAxis]]:
    axes = ((TIME, tiled.time_tiles), (ROWS, tiled.space_tiles), (COLUMNS, tiled.space_tiles))
    return [(dim, axis) for dim, axis in axes if axis and x_BCTHW.shape[dim] > axis.latent * axis.ratio]


def seams(tiled: DcAe, x_BCTHW: Tensor) -> dict[int, float]:
    """For each axis that is cut: the mean step across a border of tiles over the mean step elsewhere."""
    found = {}
    for dim, axis in cut_axes(tiled, x_BCTHW):
        lines, steps = border_lines(axis, x_BCTHW.shape[dim]), step_at_lines(x_BCTHW, dim)
        found[dim] = float(steps[lines].mean() / steps[~lines].mean())
    return found


def level_steps(tiled: DcAe, x_BCTHW: Tensor, whole_BCTHW: Tensor) -> dict[int, float]:
    """For each axis that is cut: the step of tiled less whole with its sign, averaged along each border, in levels.

    A border in space is averaged over its pixels in one frame and channel, one in time over the frame; then come sizes,
    then the mean over borders.
    """
    found = {}
    for dim, axis in cut_axes(tiled, x_BCTHW):
        steps = (x_BCTHW - whole_BCTHW).diff(dim=dim)
        along = {TIME: (ROWS, COLUMNS), ROWS: (COLUMNS,), COLUMNS: (ROWS,)}[dim]
        at_borders = steps.movedim(dim, 0)[border_lines(axis, x_BCTHW.shape[dim])].movedim(0, dim)
        found[dim] = float(at_borders.mean(along).abs().mean()) * 127.5
    return found


@dataclass(frozen=True)
class Comparison:
    """Tiled against whole; PSNR in dB of the worse clip, seams as the worst of all axes."""

    between: float
    own: float
    own_tiled: float
    seam: float
    seam_of_error: float
    level_step: float


def compare(tiled: DcAe, x_BCTHW: Tensor, whole_BCTHW: Tensor) -> Comparison:
    with quick_arithmetic(), torch.no_grad():
        parts_BCTHW, _ = reconstruct_any_size(tiled, x_BCTHW)
    assert parts_BCTHW.shape == x_BCTHW.shape
    return Comparison(
        between=float(psnr(parts_BCTHW, whole_BCTHW, 2.0).min()),
        own=float(psnr(whole_BCTHW, x_BCTHW, 2.0).min()),
        own_tiled=float(psnr(parts_BCTHW, x_BCTHW, 2.0).min()),
        seam=max(seams(tiled, parts_BCTHW).values()),
        seam_of_error=max(seams(tiled, parts_BCTHW - x_BCTHW).values()),
        level_step=max(level_steps(tiled, parts_BCTHW, whole_BCTHW).values()),
    )


def check_as_good(got: Comparison) -> None:
    assert got.own >= OWN_DB, got
    assert BETWEEN_DB <= got.between < 100, got
    assert got.own_tiled >= got.own - 0.5, got
    assert got.seam <= LARGEST_SEAM, got
    assert got.seam_of_error <= LARGEST_SEAM, got
    assert got.level_step <= LARGEST_LEVEL, got


@pytest.mark.parametrize(
    "tiles", [Tiles(32, 16, 0.25), Tiles(48, 12, 1 / 3), Tiles(None, 16, 0.25), Tiles(40, None, 0.2)], ids=str
)
def test_tiled_is_as_good_as_whole(tiles: Tiles) -> None:
    model, clips, whole = trained(SMALL)
    check_as_good(compare(in_tiles(model, tiles), clips, whole))


def test_tiled_is_as_good_as_whole_for_sizes_that_are_padded() -> None:
    model, clips, _ = trained(SMALL)
    clips = clips[:, :, :37, :79, :105]
    with quick_arithmetic(), torch.no_grad():
        whole, _ = reconstruct_any_size(model, clips)
    check_as_good(compare(in_tiles(model, Tiles(32, 16, 0.25)), clips, whole))


def test_tiles_without_overlap_show() -> None:
    """What the tests above would say if tiles were not blended."""
    model, clips, whole = trained(SMALL)
    got = compare(in_tiles(model, Tiles(32, 16, 0.0)), clips, whole)
    assert got.between < BETWEEN_DB
    assert got.seam > LARGEST_SEAM
    assert got.level_step > 3 * LARGEST_LEVEL


def test_a_tile_of_another_brightness_is_seen() -> None:
    """Four grey levels where a tile begins and none where its forerunner ends: two a line."""
    model, clips, whole = trained(SMALL)
    tiled = in_tiles(model, Tiles(32, 16, 0.25))
    for dim, axis in cut_axes(tiled, clips):
        shape = [1] * 5
        shape[dim] = -1
        number = torch.arange(clips.shape[dim]) // (axis.stride * axis.ratio)
        off = (number % 2 * 4 / 127.5).view(shape)
        assert 1.5 < level_steps(tiled, whole + off, whole)[dim] < 2.5


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "tiles"), [(name, tiles) for name, listed in LARGE_TILES.items() for tiles in listed], ids=str
)
def test_tiled_is_as_good_as_whole_at_large(name: str, tiles: Tiles) -> None:
    model, clips, whole = trained(LARGE[name])
    check_as_good(compare(in_tiles(model, tiles), clips, whole))
