"""`osora ckpt list`: what a run holds, told from headers and small files alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.findings import Report
from osora_cli.checkpoint.retention import permanent
from osora_cli.checkpoint.run_folders import looks_like_run, told_of_runs
from osora_cli.checkpoint.verify import is_checkpoint, newest_first, verify
from osora_cli.errors import CheckpointError, OsoraError


@dataclass(frozen=True)
class Row:
    """One checkpoint. `verdict` is by structure: the tensors' bytes were not read."""

    path: Path
    verdict: str
    reason: str
    epoch: int | None
    update: int | None
    saved: str | None
    bytes: int
    parts: list[str]
    ranks: int | None
    writer: str | None
    marks: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "name": self.path.name}


@dataclass(frozen=True)
class ListResult:
    """The checkpoints of a run, lowest update first."""

    run: Path
    latest: str | None
    rows: list[Row]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "list",
            "run": str(self.run),
            "latest": self.latest,
            "bytes": self.bytes,
            "checkpoints": [row.to_json() for row in self.rows],
        }


def list_run(run: Path | str) -> ListResult:
    """The checkpoints of a run.

    Raises:
        CheckpointError: there is no such folder, it is no run's, or it is a checkpoint itself.
    """
    run = Path(run)
    if not run.is_dir():
        what = "is no folder" if run.exists() else "does not exist"
        raise CheckpointError(f"`{run}` {what}", allowed="a run's folder")
    if is_checkpoint(run):
        raise CheckpointError(f"`{run}` is a checkpoint", allowed="a run", hint=f"osora ckpt verify {run}")
    if not looks_like_run(run):
        raise CheckpointError(f"`{run}` is no run", allowed="a run's folder", hint=told_of_runs(run))
    reports = [verify(folder, "structure") for folder in layout.checkpoint_folders(run)]
    return ListResult(run, _latest(run), [_row(report, marks) for report, marks in _marked(run, reports)])


def kept_by_config(run: Path) -> tuple[int, int]:
    """(`keep_n_latest`, `keep_every`) of the run's config; (-1, 0), which keep all, where there is none."""
    from osora_cli.config.freeze import thaw

    try:
        config = thaw(run).config
    except OsoraError:
        return -1, 0
    return int(getattr(config, "keep_n_latest", -1)), int(getattr(config, "keep_every", 0))


def _latest(run: Path) -> str | None:
    try:
        return fsio.read_regular(run / layout.LATEST).decode().strip()
    except (OSError, ValueError):
        return None


def _marked(run: Path, reports: list[Report]) -> list[tuple[Report, list[str]]]:
    good = [report.path for report in reports if report.is_good]
    newest = newest_first(good)[:1]
    stays = permanent([r.path for r in reports if r.is_good and r.manifest], kept_by_config(run)[1])
    latest = _latest(run)
    marks = {
        report.path: [
            *(["latest"] if report.path.name == latest else []),
            *(["resume"] if report.path in newest else []),
            *(["permanent"] if report.path in stays else []),
        ]
        for report in reports
    }
    return [(report, marks[report.path]) for report in reports]


def _row(report: Report, marks: list[str]) -> Row:
    path, manifest = report.path, report.manifest
    numbers = layout.parse_folder_name(path.name)
    files = [p for p in path.rglob("*") if p.is_file()]
    told = path / (layout.MANIFEST if (path / layout.MANIFEST).exists() else layout.RUNNING_STATES)
    saved = (
        datetime.fromtimestamp(told.stat().st_mtime, timezone.utc).isoformat("T", "seconds") if told.exists() else None
    )
    return Row(
        path=path,
        verdict=report.verdict,
        reason=report.reason,
        epoch=numbers[0] if numbers else None,
        update=numbers[1] if numbers else None,
        saved=saved,
        bytes=sum(p.stat().st_size for p in files),
        parts=list(manifest.parts) if manifest else _parts(path),
        ranks=manifest.world_size if manifest else None,
        writer=manifest.writer if manifest else None,
        marks=marks,
    )


def _parts(path: Path) -> list[str]:
    from osora_cli.checkpoint.structure import part_path

    return [name for name in (*layout.GROUPS, "lora", *layout.SMALL_NAMES) if part_path(path, name) is not None]
