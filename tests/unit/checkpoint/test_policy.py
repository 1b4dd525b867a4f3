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
from osora_cli.trainer.loop import LoopSettings, Trainer
from osora_cli.trainer.state import Progress


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


def trainer(engine: Any, minutes: float | None, update: int = 10, saved_ago: float = 120.0) -> Trainer:
    settings = LoopSettings(
        seed=0,
        epochs=1,
        max_steps=None,
        accumulation=1,
        log_every=10,
        ckpt_every=0,
        max_nonfinite=1,
        on_save_error="stop",
        batch_size=None,
        ckpt_every_minutes=minutes,
    )
    parts: dict[str, Any] = dict.fromkeys(("state", "feed", "store", "observer"))
    made = Trainer(settings=settings, engine=engine, provenance={}, progress=Progress(update=update), **parts)
    made._saved_at = time.monotonic() - saved_ago
    return made


@pytest.mark.parametrize(("saved_ago", "due"), [(120.0, True), (30.0, False)])
def test_the_clock_alone(saved_ago: float, due: bool) -> None:
    alone = Ranks(0, world_size=1)
    assert trainer(alone, 1.0, update=3, saved_ago=saved_ago)._time_is_up() is due
    assert not trainer(alone, None)._time_is_up()
    assert alone.asked == 0


def test_rank_0_decides_and_the_others_follow() -> None:
    assert trainer(Ranks(0), 1.0)._time_is_up()
    assert trainer(Ranks(1, rank_0=1.0), 1.0, saved_ago=0.0)._time_is_up(), "its own clock says no"
    assert not trainer(Ranks(1, rank_0=0.0), 1.0)._time_is_up(), "its own clock says yes"


def test_ranks_do_not_wait_for_each_other_between_logged_updates() -> None:
    engine = Ranks(0)
    assert not trainer(engine, 1.0, update=11)._time_is_up()
    assert engine.asked == 0
