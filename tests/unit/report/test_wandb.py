from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.errors import SetupError
from osora_cli.report.base import RunStart
from osora_cli.report.wandb import WandbReport


class FakeRun:
    """The calls of wandb's run that we use, written down; the service itself needs an account."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = 0

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    made: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        made.append(FakeRun(options))
        return made[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_missing_package_is_said_at_once_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SetupError) as caught:
        WandbReport("osora")
    assert caught.value.exit_code == 5
    assert "pip install 'osora[wandb]'" in str(caught.value)


def test_a_resumed_run_keeps_its_id(tmp_path: Path, runs: list[FakeRun]) -> None:
    for start in (0, 3):
        report = WandbReport("project")
        report.on_start(RunStart(tmp_path, start_update=start, config={"lr": 1e-4}))
        report.on_log({"step": start + 1, "loss": 0.5, "samples": [1], "epoch": 0, "ok": True})
        report.on_save(SaveEvent("committed", Path("d"), Counters(0, 1, 1, 1, 1), stall_seconds=0.1))
        report.close()
        report.close()
    assert runs[0].options["id"] == runs[1].options["id"] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert runs[0].options["name"] == tmp_path.name
    assert runs[0].options["config"] == {"lr": 1e-4}
    assert runs[1].logged == [(4, {"loss": 0.5, "epoch": 0})]
    assert runs[1].summary == {"checkpoint": "d", "checkpoint_stall_s": 0.1}
    assert [r.finished for r in runs] == [1, 1]
