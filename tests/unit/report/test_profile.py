"""A trace of a few updates."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from osora_cli.report.base import RunStart
from osora_cli.report.profile import ProfileTrace


def run(trace: ProfileTrace, folder: Path, first: int, last: int) -> None:
    trace.on_start(RunStart(folder, first - 1))
    for step in range(first, last + 1):
        torch.ones(4, 4) @ torch.full((4, 4), float(step))
        trace.on_update({"step": step})
    trace.close()


def test_the_updates_asked_for_are_traced_once(tmp_path: Path) -> None:
    run(ProfileTrace(2), tmp_path, 11, 20)
    assert sorted(p.name for p in (tmp_path / "profile").iterdir()) == ["updates-14-15.json.gz", "updates-14-15.txt"]
    with gzip.open(tmp_path / "profile" / "updates-14-15.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert sum(e.get("name") == "aten::mm" for e in events) == 2
    assert "aten::mm" in (tmp_path / "profile" / "updates-14-15.txt").read_text()


def test_a_run_that_ends_before_leaves_nothing_broken(tmp_path: Path) -> None:
    run(ProfileTrace(2), tmp_path, 1, 2)
    assert not (tmp_path / "profile").exists()
