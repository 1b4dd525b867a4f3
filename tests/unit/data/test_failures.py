from __future__ import annotations

import math

import numpy as np
import pytest

from osora_cli.data.clip_reader import Failure
from osora_cli.data.failures import TOLERATED, FailureLimit
from osora_cli.errors import DataError


def _failure(row: int) -> Failure:
    return Failure(row, f"{row}.mp4", "bad")


def _stops(fraction: float, bad: list[bool]) -> int | None:
    """After how many clips a pass stops whose clips are bad as given; None: never."""
    limit = FailureLimit(fraction, len(bad))
    for row, is_bad in enumerate(bad):
        try:
            # A bad one is replaced, so that one is delivered all the same.
            limit.add(1 - is_bad, [_failure(row)] if is_bad else [])
        except DataError:
            return row + 1
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 10, 20])
def test_a_few_bad_files_never_stop_a_small_table(size: int) -> None:
    bad = [i < min(size, TOLERATED) for i in range(size)]
    assert _stops(0.05, bad) is None


def test_a_small_table_that_is_mostly_bad_stops() -> None:
    assert _stops(0.05, [True] * 20) == TOLERATED + 1
    assert _stops(0.05, ([False] * 4 + [True]) * 4) == 20


def test_at_the_end_of_a_pass_the_share_itself_counts() -> None:
    for bad_files, stops in ((49, False), (50, False), (52, True)):
        bad = np.zeros(1000, dtype=bool)
        bad[np.linspace(0, 999, bad_files, dtype=int)] = True
        assert (_stops(0.05, bad.tolist()) is not None) == stops


def test_a_table_just_inside_the_limit_is_not_stopped_by_chance() -> None:
    rng = np.random.default_rng(0)
    stopped = 0
    for _ in range(200):
        bad = np.zeros(2000, dtype=bool)
        bad[rng.choice(2000, 90, replace=False)] = True  # 4.5 %
        stopped += _stops(0.05, bad.tolist()) is not None
    assert stopped <= 4


def test_a_table_far_outside_stops_early() -> None:
    rng = np.random.default_rng(1)
    after = [_stops(0.05, (rng.random(100_000) < 0.5).tolist()) for _ in range(20)]
    assert all(count is not None and count < 60 for count in after)


def test_none_may_fail_at_zero_and_all_at_one() -> None:
    assert _stops(0.0, [False] * 5 + [True]) == 6
    assert _stops(0.0, [False] * 5) is None
    assert _stops(1.0, [True] * 500) is None
    assert FailureLimit(1.0, 10).limit == math.inf


def test_a_file_that_fails_again_counts_once() -> None:
    limit = FailureLimit(0.05, 10)
    for _ in range(50):
        limit.add(1, [_failure(7)])
    assert len(limit.failed) == 1


def test_the_error_lists_the_files() -> None:
    limit = FailureLimit(0.01, 100)
    with pytest.raises(DataError) as caught:
        limit.add(0, [_failure(row) for row in range(14)])
    text = str(caught.value)
    assert text.startswith("14 of 14 clips cannot be read, more than max_bad_fraction `0.01` allows:")
    assert all(f"row {row}, `{row}.mp4`: bad" in text for row in range(10))
    assert "and 4 more" in text
    assert "osora data meta" in text
