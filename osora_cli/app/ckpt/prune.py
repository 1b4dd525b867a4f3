"""`osora ckpt prune`: retention by hand. It only tells what it would do, unless it is told to do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.app.ckpt.list import kept_by_config
from osora_cli.checkpoint import layout
from osora_cli.checkpoint.findings import Level, Report
from osora_cli.checkpoint.leftovers import dispose, move_to_trash
from osora_cli.checkpoint.retention import permanent
from osora_cli.checkpoint.run_folders import told_of_runs
from osora_cli.checkpoint.verify import is_checkpoint, newest_first, verify
from osora_cli.errors import CheckpointError, RunError, UsageError


@dataclass(frozen=True)
class PruneRow:
    """A checkpoint and what becomes of it: "keep" or "remove", and why."""

    path: Path
    action: str
    why: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "name": self.path.name}


@dataclass(frozen=True)
class PruneResult:
    """`done`: whether it was carried out; `failed`: (path, reason) of what is still there."""

    run: Path
    keep_n_latest: int
    keep_every: int
    rows: list[PruneRow]
    done: bool
    failed: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def removed(self) -> list[PruneRow]:
        return [row for row in self.rows if row.action == "remove"]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "prune",
            "run": str(self.run),
            "keep_n_latest": self.keep_n_latest,
            "keep_every": self.keep_every,
            "done": self.done,
            "bytes": sum(row.bytes for row in self.removed),
            "checkpoints": [row.to_json() for row in self.rows],
        }


def prune(
    run: Path | str,
    *,
    keep_n_latest: int | None = None,
    keep_every: int | None = None,
    quick: bool = False,
    yes: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PruneResult:
    """Remove checkpoints that verify and are neither among the newest nor permanent.

    Never removed: the newest that verifies, permanent ones, the one that the newest was resumed from, and whatever
    does not verify or was not written by osora: that is for the user to look at.

    Args:
        run: the run's folder.
        keep_n_latest: how many of those that verify stay, at least one; None: as the run's config says.
        keep_every: as in the config; None: as the run's config says.
        quick: verify by structure only. Else every byte is read first, so that what stays is known to be good.
        yes: do it.
        progress: called with (bytes read, bytes to read) of each checkpoint.

    Raises:
        CheckpointError: there is no such run.
        UsageError: nothing says how many are to stay.
        RunError: something could not be removed.
    """
    run = Path(run)
    if not run.is_dir() or is_checkpoint(run) or not layout.checkpoint_folders(run):
        raise CheckpointError(f"`{run}` is no run", allowed="the folder of a run", hint=told_of_runs(run))
    configured = kept_by_config(run)
    keep = configured[0] if keep_n_latest is None else keep_n_latest
    every = configured[1] if keep_every is None else keep_every
    if keep < 1:
        raise UsageError(
            f"`{keep}` checkpoints to keep" if keep_n_latest is not None else "the run's config keeps all checkpoints",
            where="--keep-n-latest",
            allowed="1 or more",
            hint=f"osora ckpt prune {run} --keep-n-latest 3",
        )
    level: Level = "structure" if quick else "digest"
    reports = [verify(folder, level, progress=progress) for folder in layout.checkpoint_folders(run)]
    rows = _decide(reports, keep, every)
    if not yes:
        return PruneResult(run, keep, every, rows, done=False)
    failed = _remove([row.path for row in rows if row.action == "remove"])
    if failed:
        listed = "; ".join(f"`{path.name}`: {reason}" for path, reason in failed)
        raise RunError(f"not removed: {listed}", where=str(run))
    return PruneResult(run, keep, every, rows, done=True)


def _decide(reports: list[Report], keep: int, every: int) -> list[PruneRow]:
    good = {r.path: r for r in reports if r.is_good and r.manifest is not None}
    order = newest_first(good)
    stays = permanent(good, every)
    newest = good[order[0]].manifest if order else None
    start = newest.provenance.get("resumed_from") if newest is not None else None
    rows = []
    for report in reports:
        path = report.path
        if path not in good:
            action, why = "keep", report.reason if not report.is_good else "was not written by osora"
        elif path in order[:keep]:
            action, why = "keep", f"among the newest {keep}" if keep > 1 else "the newest"
        elif path in stays:
            action, why = "keep", f"the first of {every} updates"
        elif path.name == start:
            action, why = "keep", "the run was resumed from it"
        else:
            action, why = "remove", f"older than the newest {keep}"
        rows.append(PruneRow(path, action, why, report.manifest.total_bytes if report.manifest else 0))
    return rows


def _remove(folders: list[Path]) -> list[tuple[Path, str]]:
    failed = []
    for folder in folders:
        try:
            dispose(move_to_trash(folder, "retired"))
        except OSError as error:
            failed.append((folder, error.strerror or str(error)))
    return failed
