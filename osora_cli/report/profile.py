"""RUN/profile/: a trace of a few updates by torch's profiler, for chrome://tracing or Perfetto, and its totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import profiler

from osora_cli.report.base import Record, RunStart, SilentObserver

FOLDER = "profile"
# The first updates pick kernels and grow the memory pool; then one under the profiler itself is thrown away.
_SKIPPED, _WARM_UP = 2, 1
_ROWS = 40


class ProfileTrace(SilentObserver):
    """Traces `updates` updates of this process, once, after three that are let pass.

    Writes `updates-A-B.json.gz` (the trace) and `updates-A-B.txt` (time by operator). A run that ends earlier leaves
    what there is of it. Tracing costs time: step times of these updates are no measure.
    """

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._profiler: Any = None
        self._folder = Path()
        self._first = 0

    def on_start(self, info: RunStart) -> None:
        self._folder = info.folder / FOLDER
        self._first = info.start_update + _SKIPPED + _WARM_UP + 1
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(wait=_SKIPPED, warmup=_WARM_UP, active=self._updates, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
        )
        self._profiler.start()

    def on_update(self, record: Record) -> None:
        if self._profiler is None:
            return
        self._profiler.step()
        if record["step"] >= self._first + self._updates - 1:
            self._stop()

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            traced, self._profiler = self._profiler, None
            traced.stop()

    def _write(self, traced: Any) -> None:
        self._folder.mkdir(exist_ok=True)
        stem = f"updates-{self._first}-{self._first + self._updates - 1}"
        traced.export_chrome_trace(str(self._folder / f"{stem}.json.gz"))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        totals = traced.key_averages().table(sort_by=key, row_limit=_ROWS)
        (self._folder / f"{stem}.txt").write_text(totals, encoding="utf-8")
