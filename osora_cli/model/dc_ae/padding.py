"""Clips of any length and size through a net that takes some only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from osora_cli.model.dc_ae.autoencoder import DcAe

ClipSize = tuple[int, int, int]


def padded_size(frames: int, height: int, width: int, *, time: int, space: int) -> tuple[int, int, int]:
    """The smallest clip that the net takes and that holds this one.

    A single frame stays one. Otherwise frames go up to a multiple of `time`, and at least two latent frames where
    time is compressed, since a latent of one frame is decoded as an image.
    """

    def up(size: int, step: int) -> int:
        return -(-size // step) * step

    if frames > 1:
        frames = max(up(frames, time), 2 * time if time > 1 else 1)
    return frames, up(height, space), up(width, space)


def pad_clip(x_BCTHW: Tensor, size: tuple[int, int, int]) -> Tensor:
    """Repeat the last frame, row and column up to (T, H, W)."""
    frames, height, width = (want - have for want, have in zip(size, x_BCTHW.shape[2:], strict=True))
    if not (frames or height or width):
        return x_BCTHW
    return F.pad(x_BCTHW, (0, width, 0, height, 0, frames), mode="replicate")


def encode_any(model: DcAe, x_BCTHW: Tensor) -> tuple[Tensor, ClipSize]:
    """Latents of clips of any length and size, padded by repetition; and the clips' (T, H, W) for `decode_any`."""
    frames, height, width = x_BCTHW.shape[2:]
    full = padded_size(frames, height, width, time=model.time_compression_ratio, space=model.spatial_compression_ratio)
    return model.encode(pad_clip(x_BCTHW, full).to(model.dtype)), (frames, height, width)


def decode_any(model: DcAe, z_BCTHW: Tensor, size: ClipSize) -> Tensor:
    """Clips of latents that `encode_any` made, cut back to `size`."""
    frames, height, width = size
    return model.decode(z_BCTHW)[:, :, :frames, :height, :width]


def reconstruct_any_size(model: DcAe, x_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Encode and decode clips of any length and size: padded by repetition, cut back to the size they came in.

    Returns:
        The reconstruction in the dtype of x, and the latents of the padded clip.
    """
    z_BCTHW, size = encode_any(model, x_BCTHW)
    return decode_any(model, z_BCTHW, size).to(x_BCTHW.dtype), z_BCTHW
