"""When a run saves, and what it keeps for good."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save

from osora_cli.checkpoint.retention import permanent
from osora_cli.trainer.clock import SaveClock


def steps(run: Path) -> list[int]:
    return sorted(int(p.name.rpartition("step")[2]) for p in run.glob("epoch*"))


def test_the_first_of_every_so_many_updates_stays_for_good(tmp_path: Path) -> None:
    """Also where the saves do not fall on the multiples, as with saves by the clock."""
    save(tmp_path, 2, 4, 7, 9, 11, 12, 15, keep_n_latest=2, keep_every=5)
    assert steps(tmp_path) == [7, 11, 12, 15]


def test_permanent_ones_are_kept_by_a_later_process_too(tmp_path: Path) -> None:
    save(tmp_path, 5, 6, 7, keep_n_latest=1, keep_every=5)
    save(tmp_path, 8, 9, keep_n_latest=1, keep_every=5)
    assert steps(tmp_path) == [5, 9]
    save(tmp_path, 10, keep_n_latest=1)
    assert steps(tmp_path) == [10], "without keep_every there are none"


def test_permanent_is_none_without_a_stretch() -> None:
    folders = [Path(f"epoch0-global_step{n}") for n in (0, 3, 10, 12, 20)]
    assert permanent(folders, 0) == set()
    assert permanent(folders, 10) == {folders[2], folders[4]}
    assert permanent(folders, 100) == set()


@dataclass
class Ranks:
    """An engine of two ranks, as far as the clock needs one. Rank 0 says what `rank_0` holds."""

    rank: int
    rank_0: float = 0.0
    world_size: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asked: int = 0

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return (values + self.rank_0) / 2 if self.rank else values / 2


def clock(engine: Any, minutes: float | None, *, saved_ago: float = 120.0) -> SaveClock:
    made = SaveClock(minutes, 10, engine)
    made._saved_at = time.monotonic() - saved_ago
    return made


@pytest.mark.parametrize(("saved_ago", "due"), [(120.0, True), (30.0, False)])
def test_the_clock_alone(saved_ago: float, due: bool) -> None:
    alone = Ranks(0, world_size=1)
    made = clock(alone, 1.0, saved_ago=saved_ago)
    assert made.is_up(3) is due
    made.saved()
    assert not made.is_up(4)
    assert not clock(alone, None).is_up(10)
    assert alone.asked == 0


def test_rank_0_decides_and_the_others_follow() -> None:
    assert clock(Ranks(0), 1.0).is_up(10)
    assert clock(Ranks(1, rank_0=1.0), 1.0, saved_ago=0.0).is_up(10), "its own clock says no"
    assert not clock(Ranks(1, rank_0=0.0), 1.0).is_up(10), "its own clock says yes"


def test_ranks_do_not_wait_for_each_other_between_logged_updates() -> None:
    engine = Ranks(0)
    assert not clock(engine, 1.0).is_up(11)
    assert engine.asked == 0
