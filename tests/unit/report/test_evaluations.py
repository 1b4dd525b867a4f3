"""What observers make of evaluations, and what is said of the curve meanwhile."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osora_cli.metrics.plateau import Trend
from osora_cli.report.base import RunStart
from osora_cli.report.console import ConsoleReport
from osora_cli.report.eval_pictures import EvalPictures
from osora_cli.report.history import read_history
from osora_cli.report.jsonl import MetricsFile, cut_back
from osora_cli.report.lines import evaluation_line, trend_line
from osora_cli.report.plateau_watch import PlateauWatch

SCORES = {"psnr_ema": 21.25, "ssim_ema": 0.75, "time_s": 1.5}
PICTURE = {"clips": np.full((4, 6, 3), 200, np.uint8)}


def write(run: Path, start: int, steps: range) -> None:
    observer = MetricsFile()
    observer.on_start(RunStart(run, start_update=start))
    for step in steps:
        observer.on_log({"step": step, "loss": 1.0})
        if step % 2 == 0:
            observer.on_evaluation(step, SCORES, PICTURE)
    observer.close()


def test_updates_and_evaluations_of_one_step_both_stay(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 7))
    write(tmp_path, 3, range(4, 6))
    write(tmp_path, 2, range(3, 3))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r.get("kind")) for r in lines] == [(1, None), (2, None), (2, "eval")]
    assert lines[-1] == {"step": 2, "kind": "eval", "eval/psnr_ema": 21.25, "eval/ssim_ema": 0.75, "eval/time_s": 1.5}
    assert cut_back(tmp_path, 1) == 2


def test_history_holds_each_once(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 7))
    text = (tmp_path / "metrics.jsonl").read_text()
    again = '{"step": 4, "loss": "nan"}\n{"step": 2, "kind": "eval", "eval/psnr_ema": 30}\n[1]\n{"ste'
    (tmp_path / "metrics.jsonl").write_text(text + again)
    history = read_history(tmp_path)
    assert history.series("loss")[0] == [1, 2, 3, 4, 5, 6]
    assert np.isnan(history.series("loss")[1][3])
    assert history.series("eval/psnr_ema") == ([2, 4, 6], [30.0, 21.25, 21.25])
    assert history.series("save/stall") == ([], [])
    assert history.loss_name == "loss"


def test_pictures_are_written_over_and_never_removed(tmp_path: Path) -> None:
    observer = EvalPictures()
    observer.on_start(RunStart(tmp_path))
    observer.on_evaluation(5, SCORES, {})
    assert not (tmp_path / "eval").exists()
    observer.on_evaluation(10, SCORES, PICTURE)
    observer.on_evaluation(10, SCORES, {"clips": np.full((4, 6, 3), 100, np.uint8)})
    observer.on_start(RunStart(tmp_path, start_update=5))
    assert [p.name for p in (tmp_path / "eval").iterdir()] == ["update0000010-clips.png"]
    assert np.asarray(Image.open(tmp_path / "eval" / "update0000010-clips.png"))[0, 0, 0] == 100


def test_the_line_of_an_evaluation() -> None:
    line = "scored at update 7: psnr_ema 21.25 dB, ssim_ema 0.75, 1.5 s"
    assert evaluation_line(7, SCORES) == line
    stream = io.StringIO()
    report = ConsoleReport(stream=stream)
    report.on_start(RunStart(Path(), total_updates=10))
    report.on_evaluation(7, SCORES, PICTURE)
    report.close()
    assert stream.getvalue() == line + "\n"


@pytest.mark.parametrize(
    ("status", "numbers", "words"),
    [
        ("falling", (0.012, 0.008, 0.016), "L is still falling by 1.2 % per 1,000 updates (95%: 0.8 to 1.6) over"),
        ("rising", (-0.012, -0.016, -0.008), "L is rising by 1.2 % per 1,000 updates (95%: 0.8 to 1.6) over"),
        (
            "flat",
            (0.0, -0.001, 0.001),
            "L is flat since update 300, it fell by less than 2% over updates 600 to 900: do",
        ),
        ("unclear", (0.01, -0.01, 0.03), "no telling yet whether L still falls: by -1 to 3 % per 1,000 updates"),
    ],
)
def test_what_is_said_of_a_curve(status: str, numbers: tuple[float, float, float], words: str) -> None:
    since = 300 if status == "flat" else None
    said = trend_line(Trend(status, 600, 900, 40, *numbers, since), "L", "do this")  # type: ignore[arg-type]
    assert said is not None
    assert said.startswith(words)
    assert said.endswith("do this") == (status == "flat")


def test_nothing_is_said_of_too_little() -> None:
    assert trend_line(Trend("short", 1, 2, 2), "L", "do this") is None


def test_the_watch_speaks_now_and_then_and_knows_the_past(tmp_path: Path) -> None:
    values = np.arange(1, 601) ** -0.3
    observer = MetricsFile()
    observer.on_start(RunStart(tmp_path))
    for step in range(1, 301):
        observer.on_log({"step": step, "loss": values[step - 1]})
    observer.close()
    said: list[str] = []
    watch = PlateauWatch(said.append, every_logs=50)
    watch.on_start(RunStart(tmp_path, start_update=250))
    for step in range(251, 351):
        watch.on_log({"step": step, "loss": values[step - 1]})
    assert [line.split(" over ")[1] for line in said] == ["updates 201 to 300", "updates 234 to 350"]
    assert all(line.startswith("loss is still falling by ") for line in said)
    watch.on_evaluation(350, {}, {})
    assert len(said) == 3
    for step in range(351, 451):
        watch.on_log({"step": step, "loss": values[step - 1]})
    assert len(said) == 3, "from the first evaluation on it speaks with them only"
