"""A small Video DC-AE to test with, and tiled coding written out plainly as an oracle for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.model.dc_ae.autoencoder import DcAe


def small_config(**settings: object) -> DcAeConfig:
    """Time / 4, space / 8, four latent channels; residual and both kinds of attention blocks."""
    widths, blocks = [8, 32, 32, 64], ["ResBlock", "EViT_GLU", "EViTS5_GLU", "ResBlock"]
    temporal = [False, True, True, False]
    given = {
        "latent_channels": 4,
        "encoder": {"block_type": blocks, "width_list": widths, "depth_list": [1] * 4, "temporal_downsample": temporal},
        "decoder": {"block_type": blocks, "width_list": widths, "depth_list": [1] * 4, "temporal_upsample": temporal},
        **settings,
    }
    return DcAeConfig.model_validate(given)


def light_config(time: int = 4, space: int = 8, **settings: object) -> DcAeConfig:
    """Residual blocks only, for many runs: `time` 1, 2, 4 or 8 and `space` a power of 2 not below it."""
    steps = space.bit_length() - 1
    halvings = time.bit_length() - 1
    temporal = [step >= steps - halvings for step in range(steps)] + [False]
    coder = {"width_list": [4] * (steps + 1), "depth_list": [1] * (steps + 1)}
    given = {
        "latent_channels": 2,
        "encoder": {**coder, "temporal_downsample": temporal},
        "decoder": {**coder, "temporal_upsample": temporal},
        **settings,
    }
    return DcAeConfig.model_validate(given)


def lively(model: DcAe, seed: int = 0) -> DcAe:
    """Weights that let every part of the net speak (the initialisation keeps blocks near the identity)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            draw = torch.randn(value.shape, generator=generator)
            if value.ndim > 1:
                value.copy_(draw * (0.5 / value[0].numel() ** 0.5))
            else:
                value.copy_(1 + 0.1 * draw if name.endswith("weight") else 0.02 * draw)
    return model


def tiled_encode(model: DcAe, x_BCTHW: Tensor) -> Tensor:
    """`model.encode` in tiles, by the definition."""
    config, plain = model.config, untiled(model)
    time, space = model.time_compression_ratio, model.spatial_compression_ratio

    def in_space(part: Tensor) -> Tensor:
        if not config.use_spatial_tiling or max(part.shape[3:]) <= config.spatial_tile_size:
            return plain.encode(part)
        latent = config.spatial_tile_size // space
        overlap = round(latent * config.tile_overlap_factor)
        return _grid(
            plain.encode, part, config.spatial_tile_size, (latent - overlap) * space, overlap, latent - overlap
        )

    if not config.use_temporal_tiling or x_BCTHW.shape[2] <= config.temporal_tile_size:
        return in_space(x_BCTHW)
    latent = config.temporal_tile_size // time
    overlap = round(latent * config.tile_overlap_factor)
    starts = list(range(0, x_BCTHW.shape[2], (latent - overlap) * time))
    ends = [start + config.temporal_tile_size for start in starts]
    return _row(in_space, x_BCTHW, 2, starts, ends, overlap, latent - overlap)


def tiled_decode(model: DcAe, z_BCTHW: Tensor) -> Tensor:
    """`model.decode` in tiles, by the definition, but no temporal tile of a single latent frame."""
    config, plain = model.config, untiled(model)
    time, space = model.time_compression_ratio, model.spatial_compression_ratio

    def in_space(part: Tensor) -> Tensor:
        latent = config.spatial_tile_size // space
        if not config.use_spatial_tiling or max(part.shape[3:]) <= latent:
            return plain.decode(part)
        overlap = round(latent * config.tile_overlap_factor)
        return _grid(plain.decode, part, latent, latent - overlap, overlap * space, (latent - overlap) * space)

    latent = config.temporal_tile_size // time
    if not config.use_temporal_tiling or z_BCTHW.shape[2] <= latent:
        return in_space(z_BCTHW)
    overlap = round(latent * config.tile_overlap_factor)
    frames = z_BCTHW.shape[2]
    starts = list(range(0, frames, latent - overlap))
    if frames - starts[-1] < 2 and time > 1:
        del starts[-1]
    ends = [start + latent for start in starts[:-1]] + [frames]
    return _row(in_space, z_BCTHW, 2, starts, ends, overlap * time, (latent - overlap) * time)


def untiled(model: DcAe) -> DcAe:
    """The same weights without tiles."""
    config = model.config.model_copy(update={"use_spatial_tiling": False, "use_temporal_tiling": False})
    plain = DcAe(config)
    plain.load_state_dict(model.state_dict())
    return plain


def _fade(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    extent = min(before.shape[dim], tile.shape[dim], extent)
    tile = tile.clone()
    for y in range(extent):
        old = before.select(dim, before.shape[dim] - extent + y)
        tile.select(dim, y).copy_(old * (1 - y / extent) + tile.select(dim, y) * (y / extent))
    return tile


def _row(
    coder: Callable[[Tensor], Tensor], x: Tensor, dim: int, starts: list[int], ends: list[int], extent: int, keep: int
) -> Tensor:
    tiles: list[Tensor] = []
    for start, end in zip(starts, ends, strict=True):
        tile = coder(x.narrow(dim, start, min(end, x.shape[dim]) - start))
        tiles.append(_fade(tiles[-1], tile, extent, dim) if tiles else tile)
    last = tiles.pop()
    return torch.cat([*(t.narrow(dim, 0, min(keep, t.shape[dim])) for t in tiles), last], dim)


def _grid(coder: Callable[[Tensor], Tensor], x: Tensor, length: int, stride: int, extent: int, keep: int) -> Tensor:
    tops, lefts = range(0, x.shape[3], stride), range(0, x.shape[4], stride)
    grid = [[coder(x[..., i : i + length, j : j + length]) for j in lefts] for i in tops]
    for i in range(len(tops)):
        for j in range(len(lefts)):
            if i:
                grid[i][j] = _fade(grid[i - 1][j], grid[i][j], extent, 3)
            if j:
                grid[i][j] = _fade(grid[i][j - 1], grid[i][j], extent, 4)
    return torch.cat([torch.cat([t[..., :keep, :keep] for t in row], 4) for row in grid], 3)
