"""Latents to tokens and back, and the tokens' position ids.

Shapes: B batch, C channels, T frames, H rows, W columns of the latent; p patch edge; N = T * (H/p) * (W/p) tokens of
F = C * p * p features; L text tokens, P width of the pooled text vector.

Tokens are ordered (frame, row, column) and features (channel, row offset, column offset), the first slowest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osora_cli.config.models.flux import NUM_AXES, Grid, patch_grid


def pack(x_BCTHW: Tensor, patch_size: int) -> Tensor:
    """Cut into p x p patches, one token each: `[B, C, T, H, W]` to `[B, N, F]`.

    Raises:
        ConfigError: rows or columns are no multiple of the patch.
    """
    batch, channels, *latent_size = x_BCTHW.shape
    frames, rows, columns = patch_grid((latent_size[0], latent_size[1], latent_size[2]), patch_size)
    patches = x_BCTHW.reshape(batch, channels, frames, rows, patch_size, columns, patch_size)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, frames * rows * columns, channels * patch_size**2)


def unpack(x_BNF: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The inverse of `pack`: `[B, N, F]` to `[B, C, T, H, W]`, with `grid` as `patch_grid` gives it."""
    batch, _, features = x_BNF.shape
    channels = features // patch_size**2
    frames, rows, columns = grid
    patches = x_BNF.reshape(batch, frames, rows, columns, channels, patch_size, patch_size)
    latent = patches.permute(0, 4, 1, 2, 5, 3, 6)
    return latent.reshape(batch, channels, frames, rows * patch_size, columns * patch_size)


def pack_condition(mask_B1THW: Tensor, latent_BCTHW: Tensor, patch_size: int) -> Tensor:
    """Tokens of a visual condition: the mask, then the masked latent: `[B, N, (1 + C) * p * p]`.

    Args:
        mask_B1THW: 1 where the latent is given, 0 where it is to be made.
        latent_BCTHW: the condition's latent; anything where the mask is 0.
        patch_size: edge of a patch.
    """
    mask_B1THW = mask_B1THW.to(latent_BCTHW.dtype)
    return pack(torch.cat([mask_B1THW, mask_B1THW * latent_BCTHW], dim=1), patch_size)


def image_ids(grid: Grid, batch_size: int = 1, device: torch.device | str | None = None) -> Tensor:
    """Positions (frame, row, column) of the image tokens, counted from 0: `[B, N, 3]`.

    Integers, because the ids may pass through code that casts every floating tensor: bfloat16 is exact only up to 256.
    """
    ranges = [torch.arange(length, device=device) for length in grid]
    ids_NA = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, 2)
    return ids_NA.expand(batch_size, -1, -1)


def text_ids(num_tokens: int, batch_size: int = 1, device: torch.device | str | None = None) -> Tensor:
    """Positions of the text tokens, all at the origin: zeros `[B, L, 3]`."""
    return torch.zeros(batch_size, num_tokens, NUM_AXES, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Tokens:
    """What the model takes beside the timestep: one packed latent with its text, and all ids.

    Attributes:
        img: packed latent `[B, N, F]`.
        img_ids: positions `[B, N, 3]`.
        txt: text tokens `[B, L, context]` in the latent's dtype.
        txt_ids: zeros `[B, L, 3]`.
        y_vec: pooled text vector `[B, P]` in the latent's dtype.
        grid: tokens along frames, rows and columns, to unpack with.
    """

    img: Tensor
    img_ids: Tensor
    txt: Tensor
    txt_ids: Tensor
    y_vec: Tensor
    grid: Grid


def make_tokens(latent_BCTHW: Tensor, txt_BLC: Tensor, y_vec_BP: Tensor, patch_size: int) -> Tokens:
    """Pack a latent and join it with its text; a text of one sample serves the whole batch.

    Raises:
        ConfigError: the latent's rows or columns are no multiple of the patch.
        ValueError: as many texts as neither one nor the batch.
    """
    batch = latent_BCTHW.shape[0]
    for name, value in (("txt", txt_BLC), ("y_vec", y_vec_BP)):
        if value.shape[0] not in (1, batch):
            raise ValueError(f"{name} holds {value.shape[0]} samples for a batch of {batch}")
    grid = patch_grid((latent_BCTHW.shape[2], latent_BCTHW.shape[3], latent_BCTHW.shape[4]), patch_size)
    device = latent_BCTHW.device
    return Tokens(
        img=pack(latent_BCTHW, patch_size),
        img_ids=image_ids(grid, batch, device),
        txt=txt_BLC.to(latent_BCTHW).expand(batch, -1, -1),
        txt_ids=text_ids(txt_BLC.shape[1], batch, device),
        y_vec=y_vec_BP.to(latent_BCTHW).expand(batch, -1),
        grid=grid,
    )
