"""A training step of rectified flow: where a sample stands, what is to be predicted, and the loss.

Liu et al. 2022 (arXiv:2209.03003). Time t runs from 0, data, to 1, noise. Nothing here draws: draws come in as
arguments. Shapes: B batch, C channels, T frames, H rows, W columns of latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osora_cli.model.flow import shift_time


def training_times(normal_B: Tensor, alpha: float) -> Tensor:
    """Times of training samples: the sigmoid of standard normal draws, shifted by `alpha`; fp32 `[B]` in (0, 1)."""
    return shift_time(torch.sigmoid(normal_B.float()), alpha)


def interpolate(data: Tensor, noise: Tensor, t_B: Tensor, sigma_min: float) -> Tensor:
    """The point at time t on the straight way from data to noise: (1 - t) data + (1 - (1 - sigma_min)(1 - t)) noise.

    In the dtype that comes in. `sigma_min` is the share of noise that is left at t = 0.
    """
    remaining = (1 - t_B).view(-1, *(1,) * (data.ndim - 1))
    return remaining * data + (1 - (1 - sigma_min) * remaining) * noise


def velocity(data: Tensor, noise: Tensor, sigma_min: float) -> Tensor:
    """d x_t / d t along that way, the same at all times: what the model learns to predict."""
    return (1 - sigma_min) * noise - data


def kept_frames(mask_BT: Tensor) -> Tensor:
    """Which latent frames count in the loss when those that an image condition shows do not: 1 or 0, `[B, T]`.

    Of clips whose first, last, or first and last frame is given, these are left out. All frames of other clips count,
    as those continued from a longer part (v2v) do in Open-Sora, and those of clips that would have none left.

    Args:
        mask_BT: 1 where a frame is given.
    """
    frames = mask_BT.shape[1]
    given_BT = mask_BT > 0
    inner_B = given_BT[:, 1:-1].any(dim=1) if frames > 2 else torch.zeros_like(given_BT[:, 0])
    images_only_B = ~inner_B & ~given_BT.all(dim=1)
    return (~(given_BT & images_only_B[:, None])).to(torch.float32)


def sample_losses(predicted_BCTHW: Tensor, target_BCTHW: Tensor, kept_BT: Tensor | None = None) -> Tensor:
    """Mean squared error of the velocity of each sample, in fp32, `[B]`.

    Args:
        kept_BT: 1 for the frames that count, each clip with at least one; None: all do.
    """
    error_BCTHW = (predicted_BCTHW.float() - target_BCTHW.float()).square()
    if kept_BT is None:
        return error_BCTHW.flatten(1).mean(dim=1)
    frame_BT = error_BCTHW.mean(dim=(1, 3, 4))
    return (frame_BT * kept_BT).sum(dim=1) / kept_BT.sum(dim=1)
