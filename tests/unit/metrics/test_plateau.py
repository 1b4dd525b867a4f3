"""The plateau test on curves whose truth is known. Rates stand in docs/vae.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from osora_cli.metrics.plateau import BLOCKS, MATERIAL, MIN_RECORDS, Trend, t_quantile, trend

Floats = NDArray[np.float64]
RECORDS, TRIALS, EVERY = 3000, 200, 10
STEPS = np.arange(1, RECORDS + 1) * EVERY
LAST = int(STEPS[-1])


def noise(correlation: float, size: float, trials: int = TRIALS, seed: int = 0) -> Floats:
    """Noise of a log-loss `[trials, RECORDS]`: first-order, normal, of standard deviation `size`."""
    drawn = np.random.default_rng(seed).standard_normal((trials, RECORDS))
    for i in range(1, RECORDS):
        drawn[:, i] = correlation * drawn[:, i - 1] + np.sqrt(1 - correlation**2) * drawn[:, i]
    return size * drawn


def look(logs: Floats) -> list[Trend]:
    return [trend(STEPS.tolist(), np.exp(row).tolist()) for row in logs]


def rates(found: list[Trend]) -> Callable[[str], float]:
    counts = Counter(t.status for t in found)
    return lambda status: counts[status] / len(found)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_a_flat_loss_is_seldom_said_to_move(correlation: float) -> None:
    """Nominal: 2.5 % each way."""
    rate = rates(look(noise(correlation, 0.05)))
    assert rate("falling") <= 0.05
    assert rate("rising") <= 0.05
    if correlation == 0.0:
        assert rate("flat") >= 0.8


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_a_loss_that_falls_by_what_counts_is_seldom_said_to_be_flat(correlation: float) -> None:
    """The hardest case: it falls by just MATERIAL over the last third. Nominal: 2.5 %."""
    line = np.log1p(-MATERIAL) * STEPS / (LAST / 3)
    assert rates(look(line + noise(correlation, 0.03)))("flat") <= 0.05


def test_a_power_law_falls_and_its_rate_is_right() -> None:
    found = look(-0.2 * np.log(STEPS) + noise(0.3, 0.05, trials=40))
    assert rates(found)("falling") == 1.0
    middle = LAST * 5 / 6
    true = 1 - np.exp(-0.2 * 1000 / middle)
    assert np.mean([t.fall for t in found]) == pytest.approx(true, rel=0.1)
    inside = [t.low is not None and t.high is not None and t.low <= true <= t.high for t in found]
    assert np.mean(inside) >= 0.85


def test_falling_then_flat_names_where() -> None:
    bend = 9000
    found = look(-0.3 * np.log(np.minimum(STEPS, bend)) + noise(0.0, 0.03, trials=60))
    assert rates(found)("flat") >= 0.9
    since = [t.since for t in found if t.since is not None]
    assert 0.7 * bend <= np.median(since) <= 1.5 * bend


def test_spikes_and_values_that_are_none_change_nothing() -> None:
    """One record in a hundred a thousand times too large, NaN, infinite or negative."""
    (clean,) = noise(0.0, 0.03, trials=1)
    values = np.exp(-0.2 * np.log(STEPS) + clean)
    expected = trend(STEPS.tolist(), values.tolist())
    rng = np.random.default_rng(1)
    for k, where in enumerate(rng.permutation(RECORDS)[: RECORDS // 100]):
        values[where] = (values[where] * 1000, float("nan"), float("inf"), -1.0)[k % 4]
    found = trend(STEPS.tolist(), values.tolist())
    assert (found.status, expected.status) == ("falling", "falling")
    assert found.fall == pytest.approx(expected.fall, rel=0.15)


def test_of_a_step_that_was_done_again_the_last_value_counts() -> None:
    (clean,) = noise(0.0, 0.03, trials=1)
    values = np.exp(-0.2 * np.log(STEPS) + clean).tolist()
    again = [*STEPS.tolist()[2000:2500], *STEPS.tolist()]
    assert trend(again, [99.0] * 500 + values) == trend(STEPS.tolist(), values)


def test_a_rising_loss_is_said_to_rise() -> None:
    (found,) = look(0.1 * STEPS / LAST + noise(0.0, 0.02, trials=1))
    assert found.status == "rising"
    assert found.fall is not None
    assert found.fall < 0


def test_too_few_records_say_nothing() -> None:
    assert trend([], []).status == "short"
    assert trend([1, 2], [float("nan"), 0.0]).status == "short"
    steps = list(range(1, MIN_RECORDS * 3 - 3))
    found = trend(steps, [1.0] * len(steps))
    assert (found.status, found.fall, found.since) == ("short", None, None)


def test_a_loss_that_does_not_change_at_all_is_flat_from_the_start() -> None:
    steps = list(range(BLOCKS * 12))
    found = trend(steps, [0.25] * len(steps))
    assert found.status == "flat"
    assert found.since == 0
    assert found.fall == pytest.approx(0)


@pytest.mark.parametrize(
    ("dof", "expected"), [(3, 3.182), (5, 2.571), (10, 2.228), (18, 2.101), (60, 2.000)]
)  # from any table
def test_quantiles_of_t(dof: int, expected: float) -> None:
    assert t_quantile(0.975, dof) == pytest.approx(expected, rel=4e-3)
