"""Weights & Biases, where its package is installed and the config asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osora_cli.errors import SetupError
from osora_cli.report.base import Record, RunStart, SaveEvent, SilentObserver

ID_FILE = "wandb_id.txt"


def _import() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise SetupError(
            f"reporting to Weights & Biases needs the package `wandb`: {error}",
            hint="pip install 'osora[wandb]', or leave it out: `--no-wandb`",
        ) from error
    return wandb


class WandbReport(SilentObserver):
    """Logs each logged update's and evaluation's numbers under their names in metrics.jsonl, and its pictures.

    A resumed run goes on under its id, kept in RUN/wandb_id.txt. The service keeps the first value it was given for a
    step, so the steps that a resume repeats are not shown twice.

    Raises:
        SetupError: the package is not installed; at once, not at the first log.
    """

    def __init__(self, project: str) -> None:
        self._wandb = _import()
        self._project = project
        self._run: Any = None

    def on_start(self, info: RunStart) -> None:
        path = info.folder / ID_FILE
        if path.exists():
            identifier = path.read_text(encoding="utf-8").strip()
        else:
            identifier = uuid.uuid4().hex[:12]
            path.write_text(identifier + "\n", encoding="utf-8")
        self._run = self._wandb.init(
            project=self._project,
            name=info.folder.name,
            id=identifier,
            resume="allow",
            dir=str(info.folder),
            config=dict(info.config),
        )

    def on_log(self, record: Record) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if self._run is not None:
            self._run.log(numbers, step=int(record["step"]))

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        if self._run is not None:
            shown = {f"eval/{name}": self._wandb.Image(pixels) for name, pixels in pictures.items()}
            self._run.log({f"eval/{name}": value for name, value in scores.items()} | shown, step=update)

    def on_save(self, event: SaveEvent) -> None:
        if self._run is not None and event.kind == "committed":
            # In the summary, not at a step: a save may be committed after later updates have been logged.
            self._run.summary.update({"checkpoint": str(event.path), "checkpoint_stall_s": event.stall_seconds})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
