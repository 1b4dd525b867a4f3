"""Words that ranks leave for each other, and the thread that reads them. Ranks are objects over one real store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from osora_cli.engine import watch as module
from osora_cli.engine.launch import watched
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.watch import Watch
from osora_cli.errors import Followed, RunError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LOOK_S", 0.02), ("BEAT_S", 0.05), ("GRACE_S", 0.2), ("HEARD_S", 0.4), ("DEAD_AFTER_S", 1)):
        monkeypatch.setattr(module, name, seconds)


def ranks_of(world_size: int) -> list[Ranks]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Ranks(rank, world_size, rank, None, store) for rank in range(world_size)]


class End:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self._ended.set()

    def wait(self) -> int | None:
        self._ended.wait(10)
        return self.code


def test_the_first_failure_is_everyones() -> None:
    first, second = ranks_of(2)
    one, two = Watch(first, 60), Watch(second, 60)
    assert one.failure() is None
    two.progress(7)
    assert two.post("no space", 5)
    assert not one.post("later", 1)
    failed = one.failure()
    assert failed is not None
    assert (failed.rank, failed.update, failed.exit_code, failed.message) == (1, 7, 5, "no space")


def test_a_rank_that_hangs_is_ended_after_anothers_failure() -> None:
    first, second = ranks_of(2)
    end = End()
    hanging = Watch(first, 60, end)
    hanging.start()
    Watch(second, 60).post("bad clip", 3)
    assert end.wait() == 3


def test_no_progress_ends_the_rank_with_its_number_and_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ranks_of(2)
    end = End()
    other, stuck = Watch(first, 60, End()), Watch(second, 0.3, end)
    other.start()
    stuck.start()
    stuck.progress(41)
    assert end.wait() == 1
    other.stop()
    assert "rank 1 of 2, in update 42: no progress for 0 s" in capsys.readouterr().err


def test_what_may_take_long_is_not_counted() -> None:
    first, second = ranks_of(2)
    end = End()
    other, busy = Watch(first, 60, End()), Watch(second, 0.2, end)
    other.start()
    busy.start()
    busy.progress(1)
    busy.progress(None)
    time.sleep(0.6)
    assert end.code is None
    for each in (busy, other):
        each.stop()


def test_a_rank_without_a_sign_of_life_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ranks_of(2)
    end = End()
    lead, gone = Watch(first, 60, end), Watch(second, 60, End())
    lead.start()
    gone.start()
    time.sleep(0.3)
    gone.stop()
    assert end.wait() == 1
    assert "rank 1 gave no sign of life" in capsys.readouterr().err


def fails_with(ranks: Ranks, error: Exception) -> Exception:
    with pytest.raises(Exception) as caught, watched(ranks, 60):  # noqa: PT011
        raise error
    return caught.value


def test_one_rank_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "_exit", lambda code: None)
    _, second, third = ranks_of(3)
    said = fails_with(second, RunError("a clip is damaged"))
    assert isinstance(said, RunError)
    assert said.speaks
    assert said.message == "rank 1: a clip is damaged"
    lost = fails_with(third, RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert isinstance(lost, Followed)
    assert (lost.speaks, lost.exit_code) == (False, 1)


def test_a_lost_rank_is_said_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "_exit", lambda code: None)
    monkeypatch.setattr("osora_cli.engine.launch._LOST_WAIT_S", 0.1)
    error = fails_with(ranks_of(2)[0], RuntimeError("[gloo] Connection closed by peer"))
    assert isinstance(error, RunError)
    assert error.speaks
    assert "rank 0 of 2 lost another rank in update 1" in error.message


def test_one_process_has_no_watch() -> None:
    with watched(replace(Ranks()), 60) as watch:
        assert watch is None
