from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osora_cli.report.base import RunStart
from osora_cli.report.jsonl import MetricsFile, cut_back, plain, write_json


def record(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "epoch": 0, "loss": 1.0 / step, "lr": 1e-5, "grad_norm": 0.5, "samples": [step], **more}


def write(run: Path, steps: range, start: int = 0) -> None:
    observer = MetricsFile()
    observer.on_start(RunStart(run, start_update=start))
    for step in steps:
        observer.on_update({"step": step})
        observer.on_log(record(step))
    observer.close()


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_to_the_same_bits(value: float) -> None:
    got = json.loads(json.dumps(plain({"loss": value})))["loss"]
    assert struct.pack("<d", got) == struct.pack("<d", value)


def test_single_precision_values_of_the_device_round_trip_too(tmp_path: Path) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e-3
    observer = MetricsFile()
    observer.on_start(RunStart(tmp_path))
    for i, value in enumerate(values, start=1):
        observer.on_log({"step": i, "loss": value.item(), "grad_norm": value, "samples": [np.int64(3)]})
    observer.close()
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert torch.equal(torch.tensor([r["loss"] for r in read]), values)
    assert all(r["loss"] == r["grad_norm"] and r["samples"] == [3] for r in read)


def test_what_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    observer = MetricsFile()
    observer.on_start(RunStart(tmp_path))
    observer.on_log(record(1, loss=math.nan, grad_norm=math.inf, extra=-math.inf, wait=None))
    observer.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    read = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (read["loss"], read["grad_norm"], read["extra"], read["wait"]) == ("nan", "inf", "-inf", None)
    assert math.isnan(float(read["loss"]))


def test_a_value_without_a_json_form_is_named() -> None:
    with pytest.raises(TypeError, match="object"):
        plain({"loss": object()})


def test_resume_leaves_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(4, 11), start=3)
    assert steps(tmp_path) == list(range(1, 11))
    write(tmp_path, range(6, 8), start=5)
    assert steps(tmp_path) == list(range(1, 8))


def test_records_before_the_checkpoint_are_kept_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert cut_back(tmp_path, 3) == 4
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:3])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nothing_to_cut_leaves_the_file_alone(tmp_path: Path) -> None:
    assert cut_back(tmp_path, 3) == 0
    write(tmp_path, range(1, 4))
    stat = (tmp_path / "metrics.jsonl").stat()
    assert cut_back(tmp_path, 3) == 0
    assert (tmp_path / "metrics.jsonl").stat().st_ino == stat.st_ino


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_cut_last_line_goes(tmp_path: Path, cut: int) -> None:
    write(tmp_path, range(1, 5))
    path = tmp_path / "metrics.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert cut_back(tmp_path, 10) == 1
    assert steps(tmp_path) == [1, 2, 3]


def test_a_cut_line_that_somebody_appended_to_goes_as_well(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo{"step": 3}\n{"step": 3}\n{"step": 3, "again": 1}\n[3]\n')
    assert cut_back(tmp_path, 10) == 3
    assert path.read_text() == '{"step": 1}\n{"step": 3, "again": 1}\n'


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from osora_cli.report.jsonl import MetricsFile; from osora_cli.report.base import RunStart\n"
        "o = MetricsFile(); o.on_start(RunStart(Path(sys.argv[1])))\n"
        "for i in range(1, 10**9): o.on_log({'step': i, 'loss': 1 / i, 'samples': list(range(50))})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = path.read_bytes().splitlines(keepends=True)
    whole = lines if lines[-1].endswith(b"\n") else lines[:-1]
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    cut_back(tmp_path, 50)
    assert steps(tmp_path) == list(range(1, 51))


def test_write_json_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"psnr": math.inf, "path": tmp_path, "size": (3, 4), "name": "ö"})
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "psnr": "inf",
        "path": str(tmp_path),
        "size": [3, 4],
        "name": "ö",
    }
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text(encoding="utf-8"))["size"] == [3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


@dataclass(frozen=True)
class Saved:
    """A save event, as a store hands it over."""

    kind: str
    path: Path
    counters: Any = None
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    error: str | None = None


def test_saves_have_a_kind_of_their_own_and_are_cut_back_like_the_rest(tmp_path: Path) -> None:
    observer = MetricsFile()
    observer.on_start(RunStart(tmp_path))
    for step in (1, 2):
        observer.on_log(record(step))
        counters = SimpleNamespace(actual_update_step=step)
        observer.on_save(Saved("submitted", tmp_path, counters))
        observer.on_save(Saved("committed", tmp_path, counters, bytes=4_000_000_000, seconds=2.0, stall_seconds=0.25))
    observer.on_save(Saved("failed", tmp_path, SimpleNamespace(actual_update_step=3), error="no space"))
    observer.on_save(Saved("removed", tmp_path))
    observer.close()
    observer.on_save(Saved("committed", tmp_path, counters))  # after the end: nothing, and no error
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    saves = [line for line in lines if line.get("kind") == "save"]
    numbers = {"save/bytes": 4_000_000_000, "save/seconds": 2.0, "save/stall": 0.25, "save/gb_per_s": 2.0}
    assert saves[0] == {"step": 1, "kind": "save", **numbers}
    assert saves[-1] == {"step": 3, "kind": "save", "save/error": "no space"}
    assert cut_back(tmp_path, 1) == 3
    assert steps(tmp_path) == [1, 1]
