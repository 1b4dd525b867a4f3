from __future__ import annotations

from pathlib import Path

import pytest

from osora_cli.checkpoint.events import SaveEvent
from osora_cli.report.base import ObserverGroup, Record, RunStart, SilentObserver


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, info: RunStart) -> None:
        self.calls.append("start")

    def on_update(self, record: Record) -> None:
        self.calls.append(f"update {record['step']}")

    def on_log(self, record: Record) -> None:
        self.calls.append(f"log {record['step']}")

    def on_event(self, kind: str, text: str, data: Record) -> None:
        self.calls.append(f"{kind} {text}")

    def on_save(self, event: SaveEvent) -> None:
        self.calls.append(event.kind)

    def close(self) -> None:
        self.calls.append("close")


class Failing(Recorder):
    def on_log(self, record: Record) -> None:
        super().on_log(record)
        raise OSError(28, "No space left on device")


def run(group: ObserverGroup) -> None:
    group.on_start(RunStart(Path("run")))
    for step in (1, 2):
        group.on_update({"step": step})
        group.on_log({"step": step})
    group.on_event("note", "hello", {})
    group.on_save(SaveEvent("committed", Path("d")))
    group.close()


def test_all_are_told_in_order() -> None:
    observers = [Recorder(), Recorder()]
    run(ObserverGroup(observers))
    expected = ["start", "update 1", "log 1", "update 2", "log 2", "note hello", "committed", "close"]
    assert [o.calls for o in observers] == [expected, expected]


def test_one_that_fails_is_named_once_and_the_others_go_on() -> None:
    failing, good, said = Failing(), Recorder(), []
    run(ObserverGroup([failing, good], said.append))
    assert len(said) == 1
    assert "Failing" in said[0]
    assert "No space left on device" in said[0]
    assert failing.calls == ["start", "update 1", "log 1", "close"]
    assert "log 2" in good.calls
    assert good.calls[-1] == "close"


def test_a_start_that_fails_ends_the_run() -> None:
    class NoStart(Recorder):
        def on_start(self, info: RunStart) -> None:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        ObserverGroup([NoStart()]).on_start(RunStart(Path("run")))
