from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.report.base import RunStart
from osora_cli.report.console import ConsoleReport, LogFile, Pace
from osora_cli.report.lines import save_line, time_left, update_line

RECORD = {
    "step": 20,
    "epoch": 1,
    "loss": 0.123456,
    "lr": 5e-5,
    "grad_norm": 1.5,
    "samples": [1, 2],
    "step_s": 0.25,
    "data_wait_s": 0.01,
    "frames_per_s": 128.0,
    "skipped_updates": 0,
}
COUNTERS = Counters(epoch=1, step=9, global_step=40, batch_size=2, actual_update_step=20)
FOLDER = Path("runs/x/epoch1-global_step20")
SUBMITTED = SaveEvent("submitted", FOLDER, COUNTERS)
COMMITTED = SaveEvent("committed", FOLDER, COUNTERS, bytes=2 * 10**9, seconds=4.0, stall_seconds=0.012)
FAILED = SaveEvent("failed", FOLDER, COUNTERS, error="no space")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(report: ConsoleReport, run: Path) -> None:
    report.on_start(RunStart(run, total_updates=100))
    report.on_update({"step": 20, "epoch": 1, "lr": 5e-5})
    report.on_log(RECORD)
    report.on_event("note", "batches [8] left over", {})
    report.on_event("warning", "clip of row 3 was replaced", {})
    report.on_save(SUBMITTED)
    report.on_save(COMMITTED)
    report.on_save(FAILED)
    report.close()
    report.close()


def test_update_line_carries_what_people_watch() -> None:
    line = update_line({**RECORD, "peak_memory_gib": 1.5, "tflops": 3.25, "peak_tflops": 989.0}, 100, 75.2)
    assert line == (
        "update 20/100, epoch 1: loss 0.12346, lr 5e-05, grad norm 1.5, 0.250 s/update, data wait 0.010 s, "
        "128 frames/s, 3.25 TFLOP/s, 989 TFLOP/s possible, peak memory 1.50 GiB, 0:01:15 left"
    )


def test_update_line_without_numbers_it_does_not_have() -> None:
    assert update_line({"step": 3, "epoch": 0, "loss": math.nan, "skipped_updates": 2}, None, None) == (
        "update 3, epoch 0: loss nan, 2 non-finite updates skipped so far"
    )


def test_save_lines() -> None:
    assert save_line(COMMITTED) == (
        "Saved checkpoint at epoch 1, step 9, global_step 20 to runs/x/epoch1-global_step20 "
        "(2.000 GB, 4.00 s, 0.50 GB/s, stall 0.012 s)"
    )
    assert save_line(SUBMITTED) == (
        "Saving checkpoint at epoch 1, step 9, global_step 20 to runs/x/epoch1-global_step20, in flight"
    )
    assert save_line(FAILED).endswith("failed: no space")
    assert save_line(SaveEvent("removed", FOLDER)) == "Removed checkpoint runs/x/epoch1-global_step20"
    assert save_line(SaveEvent("removed", FOLDER, error="busy")).endswith("epoch1-global_step20: busy")


def test_time_left_is_days_and_a_clock() -> None:
    assert time_left(3723.4) == "1:02:03"
    assert time_left(2 * 86400 + 60) == "2 days, 0:01:00"
    assert time_left(-1.0) == "0:00:00"


def test_pace_counts_from_the_resume() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    pace.start(RunStart(Path("run"), start_update=50, total_updates=100))
    assert pace.left(50) is None
    now[0] += 20
    assert pace.left(60) == pytest.approx(80.0)
    pace.start(RunStart(Path("run")))
    assert pace.left(5) is None


def test_without_a_terminal_each_logged_update_is_one_plain_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    talk(ConsoleReport(stream=stream), tmp_path)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("update 20/100, epoch 1: loss 0.12346")
    assert "peak memory" in lines[0]
    assert "\x1b" not in stream.getvalue()
    assert lines[1] == "batches [8] left over"
    assert lines[2] == "warning: clip of row 3 was replaced"
    assert lines[4].startswith("Saved checkpoint at epoch 1, step 9, global_step 20 to runs/x/epoch1-global_step20 (")


def test_quiet_says_only_what_is_wrong(tmp_path: Path) -> None:
    for stream in (io.StringIO(), Terminal()):
        talk(ConsoleReport(quiet=True, stream=stream), tmp_path)
        lines = stream.getvalue().splitlines()
        assert [line.split(":")[0] for line in lines] == [
            "warning",
            "the save at epoch 1, step 9, global_step 20 to runs/x/epoch1-global_step20 failed",
        ]


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    talk(ConsoleReport(stream=stream), tmp_path)
    assert "20/100" in stream.getvalue()
    assert "loss 0.1235" in stream.getvalue()
    assert "Saved checkpoint" in stream.getvalue()
    assert "\x1b[3" in stream.getvalue()  # a colour


def test_no_color_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    talk(ConsoleReport(stream=stream), tmp_path)
    assert "20/100" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()
    assert "\x1b[9" not in stream.getvalue()


def test_log_txt_is_appended_over_resumes(tmp_path: Path) -> None:
    for start in (0, 10):
        log = LogFile()
        log.on_start(RunStart(tmp_path, start_update=start, total_updates=100))
        log.on_log(RECORD)
        log.on_event("warning", "two\nlines", {})
        log.on_save(COMMITTED)
        log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 10
    texts = [line.split(" ", 2)[2] for line in lines]
    assert texts[0] == "started"
    assert texts[5] == "resumed after update 10"
    assert texts[2:4] == ["warning: two", "lines"]
    assert texts[4].startswith("Saved checkpoint at epoch 1")


def test_log_txt_has_what_was_said_before_the_start(tmp_path: Path) -> None:
    log = LogFile()
    log.on_event("warning", "too large", {})
    log.on_start(RunStart(tmp_path))
    log.on_event("note", "built", {})
    log.close()
    texts = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert texts == ["started", "warning: too large", "built"]
