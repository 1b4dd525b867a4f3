"""`osora report`: what a run has done, as plots, one page and one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.app.observers import disc_advice
from osora_cli.app.runs import read_info
from osora_cli.checkpoint.layout import parse_folder_name
from osora_cli.checkpoint.run_folders import told_of_runs
from osora_cli.errors import UsageError
from osora_cli.metrics.plateau import Trend
from osora_cli.report.history import History, read_history
from osora_cli.report.jsonl import FILE_NAME
from osora_cli.report.lines import trend_line
from osora_cli.report.page import page
from osora_cli.report.plots import plots

SCHEMA_VERSION = 1
FOLDER = "report"
PAGE = "report.html"


@dataclass(frozen=True)
class ReportResult:
    """What stands in a report.

    Attributes:
        run: the run's folder.
        verdict: what the loss does, in words.
        trend: the same in numbers.
        page: the HTML file; plots: the PNG files by name.
        facts: label and value, as they stand on the page.
    """

    run: Path
    verdict: str
    loss: str
    trend: Trend
    page: Path
    plots: dict[str, Path]
    history: History
    facts: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        history = self.history
        return {
            "schema_version": SCHEMA_VERSION,
            "run": str(self.run),
            "verdict": self.verdict,
            "loss": self.loss,
            "trend": self.trend.to_json(),
            "updates": history.updates[-1]["step"] if history.updates else 0,
            "last": history.updates[-1] if history.updates else None,
            "evaluations": history.evaluations,
            "saves": history.saves,
            "page": str(self.page),
            "plots": {name: str(path) for name, path in self.plots.items()},
        }


def report_run(run: Path, output: Path | None = None) -> ReportResult:
    """Read a run's records and write its plots and page.

    Args:
        run: the run's folder, or a checkpoint in it.
        output: folder to write to; None: `report` in the run's.

    Raises:
        UsageError: no such folder, or one without records.
        SetupError: plots cannot be drawn, or the folder cannot be written.
    """
    if parse_folder_name(run.name) is not None and not (run / FILE_NAME).is_file():
        run = run.resolve().parent
    if not (run / FILE_NAME).is_file():
        what = (
            "does not exist" if not run.exists() else f"holds no {FILE_NAME}: it is no run, or has logged nothing yet"
        )
        hint = told_of_runs(run) or "name the folder that a training made, as in outputs/RUN"
        raise UsageError(f"`{run}` {what}", where="RUN", hint=hint)
    history = read_history(run)
    if not history.updates and not history.evaluations:
        raise UsageError(f"`{run / FILE_NAME}` holds no record yet", where="RUN")
    info, found = read_info(run), history.trend()
    advice = disc_advice(info.command if info else "", run)
    verdict = trend_line(found, history.loss_name, advice) or (
        f"{history.loss_name}: too few records at the end of the curve to say what it does ({found.records})"
    )
    folder = output if output is not None else run / FOLDER
    images = plots(history)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, image in images.items():
        paths[name] = folder / f"{name}.png"
        paths[name].write_bytes(image)
    facts = _facts(history, info.command if info else None)
    (folder / PAGE).write_text(page(f"osora run {run.resolve().name}", verdict, facts, images), encoding="utf-8")
    return ReportResult(run, verdict, history.loss_name, found, folder / PAGE, paths, history, facts)


def _facts(history: History, command: str | None) -> list[tuple[str, str]]:
    """The last values of what was logged, scored and saved."""
    facts = [("command", f"osora {command}")] if command else []
    if history.updates:
        last = history.updates[-1]
        facts.append(("updates", str(last["step"])))
        names = ("loss", "rec_per_pixel", "perceptual", "lr", "grad_norm", "step_s", "skipped_updates")
        facts += [(name, f"{last[name]:.6g}") for name in names if isinstance(last.get(name), (int, float))]
    if history.evaluations:
        last = history.evaluations[-1]
        facts.append(("scored at update", str(last["step"])))
        scores = [(n.removeprefix("eval/"), v) for n, v in last.items() if n.startswith("eval/")]
        facts += [(name, f"{value:.5g}") for name, value in scores if isinstance(value, (int, float))]
    _, stalls = history.series("save/stall")
    if stalls:
        facts.append(("saves", f"{len(stalls)}, longest stall {max(stalls):.3f} s"))
    return facts
