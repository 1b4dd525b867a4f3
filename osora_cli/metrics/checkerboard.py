"""How much of an error repeats with the period of the net's up-sampling: the grid, or checkerboard, of a decoder.

A decoder that enlarges by P treats the P places of a cell unequally, and what it leaves in the error then repeats every
P places: a spectrum with energy at multiples of 1/P (Odena, Dumoulin, Olah 2016, "Deconvolution and checkerboard
artifacts"). Along one axis, with lines cut to a whole number B >= 2 of periods, N = B P places, and E(k) the discrete
Fourier transform of a line of the error:

    harmonic = sum over k = B, 2B, .. (P-1)B of |E(k)|^2        the period and its harmonics
    total    = sum over k = 1 .. N-1 of |E(k)|^2                all but the mean
    around   = the same sum as `harmonic`, of (|E(k-1)|^2 + |E(k+1)|^2) / 2

each summed over all lines. `share` = harmonic / total is the relative spectral energy, in [0, 1]. `ratio` = harmonic /
around compares with the neighbouring frequencies, which hold what the error has there anyway: 1 where nothing repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osora_cli.metrics.clips import as_clips

LEAST_PERIODS = 2
_AT_ONCE = 2**22  # elements transformed at a time


@dataclass
class GridEnergy:
    """Sums over lines; those of several parts or axes may be added."""

    harmonic: float = 0.0
    around: float = 0.0
    total: float = 0.0

    def __iadd__(self, other: GridEnergy) -> GridEnergy:
        self.harmonic += other.harmonic
        self.around += other.around
        self.total += other.total
        return self

    @property
    def share(self) -> float | None:
        """Share of the error's energy that repeats with the period; None without an error that varies."""
        return self.harmonic / self.total if self.total > 0 else None

    @property
    def ratio(self) -> float | None:
        """Energy at the period and its harmonics against that at the frequencies beside them."""
        return self.harmonic / self.around if self.around > 0 else None


def grid_energy(error: torch.Tensor, axis: int, period: int) -> GridEnergy:
    """Sums over all lines of an error along one axis.

    Args:
        error: `[B, C, T, H, W]` or `[T, C, H, W]` float, reconstruction less original. Its first place on the axis is
            the first of a period; what is left behind the last whole period is not looked at.
        axis: 0 along time, 1 along rows (from top to bottom), 2 along columns.
        period: places, from 1. Nothing is summed where the axis has fewer than two periods, or the period is 1.
    """
    lines = as_clips(error).movedim(axis + 2, -1)
    periods = lines.shape[-1] // period
    sums = GridEnergy()
    if period < 2 or periods < LEAST_PERIODS:
        return sums
    lines = lines[..., : periods * period].flatten(0, 1).flatten(0, -2)
    for some in torch.split(lines, max(1, _AT_ONCE // lines.shape[-1])):
        sums += _sums(some, period, periods)
    return sums


def space_energy(error: torch.Tensor, period: int) -> GridEnergy:
    """`grid_energy` along rows and along columns, added."""
    sums = grid_energy(error, 1, period)
    sums += grid_energy(error, 2, period)
    return sums


def _sums(lines: torch.Tensor, period: int, periods: int) -> GridEnergy:
    places = lines.shape[-1]
    half = torch.fft.rfft(lines.float()).abs().square().double().sum(0)
    # A real line's spectrum is symmetric: half of it, mirrored, is all of it.
    power = torch.cat([half, half[1 : (places + 1) // 2].flip(0)])
    harmonics = torch.arange(1, period, device=power.device) * periods
    around = (power[harmonics - 1] + power[(harmonics + 1) % places]) / 2
    return GridEnergy(power[harmonics].sum().item(), around.sum().item(), power[1:].sum().item())
