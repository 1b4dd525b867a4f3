"""Against sums written out by hand, and on errors with and without a grid."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from osora_cli.metrics.checkerboard import GridEnergy, grid_energy, space_energy


def by_hand(line: list[float], period: int) -> tuple[float, float, float]:
    periods = len(line) // period
    n = periods * period
    power = [abs(sum(v * cmath.exp(-2j * math.pi * k * i / n) for i, v in enumerate(line[:n]))) ** 2 for k in range(n)]
    harmonics = range(periods, n, periods)
    around = sum((power[k - 1] + power[(k + 1) % n]) / 2 for k in harmonics)
    return sum(power[k] for k in harmonics), around, sum(power[1:])


@pytest.mark.parametrize(("axis", "period"), [(0, 2), (0, 4), (1, 3), (2, 4), (2, 7)])
def test_sums_are_those_of_the_formula(axis: int, period: int) -> None:
    error = torch.randn(1, 2, 9, 10, 15, generator=torch.Generator().manual_seed(0))
    want = torch.zeros(3, dtype=torch.float64)
    for line in error.movedim(axis + 2, -1).reshape(-1, error.shape[axis + 2]).tolist():
        want += torch.tensor(by_hand(line, period), dtype=torch.float64)
    got = grid_energy(error, axis, period)
    assert [got.harmonic, got.around, got.total] == pytest.approx(want.tolist(), rel=1e-5)
    # Frames first, as one clip of a video is.
    assert grid_energy(error[0].transpose(0, 1), axis, period) == got


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_repeats_is_all_of_it_and_what_does_not_is_as_much_as_around(axis: int) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 3, 32, 64, 64, generator=generator)
    assert grid_energy(noise, axis, 4).ratio == pytest.approx(1, abs=0.05)
    places = noise.shape[axis + 2]
    assert grid_energy(noise, axis, 4).share == pytest.approx(3 / (places - 1), rel=0.05)
    pattern = torch.randn(4, generator=generator).repeat(places // 4)
    shape = [1] * 5
    shape[axis + 2] = places
    grid = pattern.view(shape).expand(noise.shape)
    assert grid_energy(grid, axis, 4).share == pytest.approx(1)
    both = grid_energy(noise + 0.5 * grid, axis, 4)
    assert both.ratio is not None
    assert both.ratio > 2
    # A checkerboard of single pixels is a harmonic of every even period.
    single = ((torch.arange(places) % 2) * 2.0 - 1).view(shape).expand(noise.shape)
    assert grid_energy(single, axis, 4).share == pytest.approx(1)


def test_a_smooth_error_and_a_constant_one_are_no_grid() -> None:
    columns = torch.linspace(0, 3, 128).sin()
    smooth = columns.expand(4, 3, 64, 128)
    energy = space_energy(smooth, 8)
    assert energy.share is not None
    assert energy.share < 0.02
    assert energy.ratio == pytest.approx(1, abs=0.1)
    flat = space_energy(torch.full((4, 3, 64, 64), 0.25), 8)
    assert flat.total == pytest.approx(0, abs=1e-6)
    assert GridEnergy().share is None
    assert GridEnergy().ratio is None


def test_too_short_axes_are_not_looked_at() -> None:
    error = torch.randn(1, 3, 7, 15, 16)
    assert grid_energy(error, 0, 4) == GridEnergy()
    assert grid_energy(error, 0, 1) == GridEnergy()
    assert grid_energy(error, 1, 8) == GridEnergy()
    assert space_energy(error, 8) == grid_energy(error, 2, 8) != GridEnergy()


def test_in_parts_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.randn(2, 3, 8, 16, 16)
    whole = grid_energy(error, 2, 4)
    monkeypatch.setattr("osora_cli.metrics.checkerboard._AT_ONCE", 48)
    parts = grid_energy(error, 2, 4)
    assert [parts.harmonic, parts.around, parts.total] == pytest.approx([whole.harmonic, whole.around, whole.total])
