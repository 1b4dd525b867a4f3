"""An autoencoder that needs no training: means of blocks, and blocks of one colour back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BlockMeans(nn.Module):
    """Latents are the means over blocks of 2 frames and 4 x 4 px, times a scale; no frame is a latent by itself."""

    is_causal = False
    time_compression_ratio = 2
    spatial_compression_ratio = 4
    latent_channels = 3

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=False)

    def encode(self, x_BCTHW: Tensor) -> Tensor:
        time = min(2, x_BCTHW.shape[2])
        return F.avg_pool3d(x_BCTHW, (time, 4, 4)) * self.scale

    def decode(self, z_BCTHW: Tensor) -> Tensor:
        time = 2 if z_BCTHW.shape[2] > 1 else 1
        return F.interpolate(z_BCTHW / self.scale, scale_factor=(time, 4, 4), mode="nearest")
