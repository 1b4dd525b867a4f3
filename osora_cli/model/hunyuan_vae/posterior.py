"""Diagonal Gaussian posterior of latents (Kingma and Welling 2013, arXiv:1312.6114).

Shapes: B batch, C latent channels, T latent frames, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0


@dataclass(frozen=True)
class DiagonalGaussian:
    """Mean and log-variance [B, C, T, H, W] of independent normal variables."""

    mean: Tensor
    logvar: Tensor

    @classmethod
    def from_moments(cls, moments_BMTHW: Tensor) -> DiagonalGaussian:
        """From an encoder's output [B, 2*C, T, H, W]: means, then log-variances, which are held to [-30, 20]."""
        mean_BCTHW, logvar_BCTHW = moments_BMTHW.chunk(2, dim=1)
        return cls(mean_BCTHW, logvar_BCTHW.clamp(LOGVAR_MIN, LOGVAR_MAX))

    def mode(self) -> Tensor:
        """The most likely value: the mean."""
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A draw, in the dtype of the mean. The noise is drawn on the generator's device."""
        device = generator.device if generator is not None else self.mean.device
        noise = torch.randn(self.mean.shape, generator=generator, device=device, dtype=self.mean.dtype)
        return self.mean + torch.exp(0.5 * self.logvar) * noise.to(self.mean.device)

    def kl(self) -> Tensor:
        """Divergence from the standard normal, summed over all axes but the batch, in fp32: [B].

        0.5 * sum(mean^2 + exp(logvar) - 1 - logvar).
        """
        mean, logvar = self.mean.float(), self.logvar.float()
        return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).flatten(1).sum(dim=1)
