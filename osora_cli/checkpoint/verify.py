"""The verdict on a checkpoint, and on all of a run. Never writes, never runs a pickle, needs neither CUDA nor torch
(but for the `.bin` files of Open-Sora's own checkpoints, and for the values that the deep level looks at)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osora_cli.checkpoint import fsio, layout, legacy, structure
from osora_cli.checkpoint.digests import Progress, check_digests
from osora_cli.checkpoint.findings import Check, Finding, Level, Report, RunReport, Verdict
from osora_cli.checkpoint.layout import GROUPS
from osora_cli.checkpoint.manifest import LaterFormat, ManifestError, parse_manifest
from osora_cli.checkpoint.structure import Inspection
from osora_cli.errors import CheckpointError

if TYPE_CHECKING:
    from osora_cli.checkpoint.deep import NetworkShapes

# What makes a folder a checkpoint, whatever it is named.
_MARKS = (layout.RUNNING_STATES, layout.MANIFEST, *(g.folder for g in GROUPS.values() if g.folder), "lora")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is to be judged as a checkpoint (and not as a run): by its name or by what it holds."""
    if not path.is_dir():
        return False
    if layout.parse_folder_name(path.name) or path.name.startswith((layout.STAGING_PREFIX, layout.TRASH_PREFIX)):
        return True
    return any((path / mark).exists() for mark in _MARKS[:2]) or (path / "model").is_dir()


def verify(
    path: Path | str,
    level: Level = "digest",
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    networks: NetworkShapes | None = None,
) -> Report:
    """Judge one checkpoint.

    Args:
        path: its folder.
        level: "structure" reads headers and small files, "digest" every byte, "deep" looks at the values too.
        progress: called with (bytes read, bytes to read).
        threads: readers; None: by the number of cores.
        networks: at the deep level, what the run's config asks of the weights.

    Returns:
        A report. A checkpoint with a manifest is "ok" only from the digest level on, else "complete".

    Raises:
        CheckpointError: there is no such folder.
    """
    started = time.monotonic()
    path = Path(path)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise CheckpointError(f"`{path}` {what}", allowed="a checkpoint or a run")
    kind = _kind(path)
    if kind is not None:
        return Report(path, level, kind, seconds=time.monotonic() - started)
    inspection = Inspection(path, level)
    stranger = _of_another_run(path)
    if stranger is not None:
        check = Check("run", [Finding(layout.MANIFEST, None, stranger)])
        return Report(path, level, "foreign", [check], seconds=time.monotonic() - started)
    try:
        checks = _run_checks(inspection, progress, threads)
        if level == "deep":
            checks += _deep_checks(inspection, checks, progress, threads, networks)
    except LaterFormat as error:
        checks = [Check("manifest", [Finding(layout.MANIFEST, None, str(error))])]
        return Report(path, level, "foreign", checks, inspection.counters, seconds=time.monotonic() - started)
    return Report(
        path,
        level,
        _verdict(inspection, checks),
        checks,
        inspection.counters,
        inspection.manifest,
        inspection.bytes_read,
        time.monotonic() - started,
    )


def _of_another_run(path: Path) -> str | None:
    """What to say of a checkpoint that lies in a run it was not made by; None where both do not say who they are."""
    try:
        run = json.loads(fsio.read_regular(path.resolve().parent / layout.RUN_FILE))["run_id"]
        own = parse_manifest(fsio.read_regular(path / layout.MANIFEST)).provenance.get("run_id")
    except (OSError, ValueError, KeyError, TypeError, LaterFormat, ManifestError):
        return None
    return f"is of the run `{own}`, and lies in `{run}`" if own and own != run else None


def _kind(path: Path) -> Verdict | None:
    """ "pruned" or "foreign" where there is nothing to check."""
    names = {entry.name for entry in path.iterdir()} - {layout.OWNER}
    if any(name in names for name in (*_MARKS, "ema.safetensors", "master.safetensors", layout.EMA_PT)):
        return None
    return "pruned" if names == {layout.EVAL} else "foreign"


@dataclass(frozen=True)
class _Step:
    name: str
    run: Callable[[Inspection], Iterable[Finding]]
    applies: Callable[[Inspection], bool] = lambda i: True


_STRUCTURE = (
    _Step("running states", structure.check_running_states),
    _Step("folder name", structure.check_name),
    _Step("manifest", structure.check_manifest, lambda i: i.is_osoras),
    _Step("files", structure.check_files),
    _Step("headers", structure.check_headers),
    _Step("indexes", structure.check_indexes),
    _Step("async log", structure.check_log),
    _Step("parts", structure.check_parts),
)
_WITHOUT_MANIFEST = (
    _Step("pickles", legacy.check_pickles),
    _Step("bin shards", legacy.check_bin_shards),
    _Step("holes", legacy.check_holes),
)


def _run_checks(i: Inspection, progress: Progress | None, threads: int | None) -> list[Check]:
    checks: list[Check] = []
    seen: set[tuple[str, str]] = set()

    def add(name: str, findings: Iterable[Finding], detail: str = "") -> None:
        check = Check(name, detail=detail)
        for finding in findings:
            # Several checks come upon the same missing file; once is enough.
            if finding.kind == "missing" and finding.tensor is None:
                if (finding.file, "missing") in seen:
                    continue
                seen.add((finding.file, "missing"))
            check.findings.append(finding)
            if finding.kind != "note":
                i.spoiled.add(finding.file)
        checks.append(check)

    for step in _STRUCTURE:
        if step.applies(i):
            add(step.name, step.run(i))
    if i.manifest is None:
        for step in _WITHOUT_MANIFEST:
            add(step.name, step.run(i))
        checks.append(Check("digests", detail="no manifest: flipped bits cannot be told", skipped=True))
    else:
        skip = structure.without_bytes(i, i.manifest)
        what = (
            "every byte" if i.level != "structure" else "headers and small files only: the tensors' bytes were not read"
        )
        add("digests", check_digests(i, i.manifest, skip, threads=threads, progress=progress), what)
    add("optimizer", structure.check_optimizer(i))
    return checks


def _deep_checks(
    i: Inspection,
    checks: list[Check],
    progress: Progress | None,
    threads: int | None,
    networks: NetworkShapes | None,
) -> list[Check]:
    if any(check.status == "failed" for check in checks):
        return [Check("values", detail="not looked at: what the tensors hold is in doubt already", skipped=True)]
    from osora_cli.checkpoint.deep import deep_checks

    return deep_checks(i.path, saved_before(i.path), networks, threads=threads, progress=progress)


def saved_before(path: Path) -> Path | None:
    """The checkpoint of the same run that was saved before this one, None where there is none."""
    run = path.resolve().parent
    order = newest_first(layout.checkpoint_folders(run))
    older = order[order.index(path.resolve()) + 1 :] if path.resolve() in order else []
    return next((folder for folder in older if (folder / layout.RUNNING_STATES).exists()), None)


def _verdict(i: Inspection, checks: list[Check]) -> Verdict:
    kinds = {finding.kind for check in checks for finding in check.findings}
    if "damage" in kinds:
        return "damaged"
    if "missing" in kinds:
        return "incomplete"
    return "ok" if i.manifest is not None and i.level != "structure" else "complete"


def is_good(path: Path) -> bool:
    """Whether a folder is a whole checkpoint with a manifest, by its structure."""
    report = verify(path, "structure")
    return report.is_good and report.manifest is not None


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Checkpoints of one run in the order in which a resume tries them.

    The number of the save decides (a run taken back to an earlier step goes on from there, not from the old branch).
    A folder without a readable one stands just above those of the same or a lower update.
    """
    known: dict[Path, int | None] = {folder: _sequence(folder) for folder in folders}
    updates = {folder: update_of(folder) for folder in known}

    def order(folder: Path) -> tuple[float, tuple[int, int]]:
        sequence: float | None = known[folder]
        if sequence is None:
            below = [s for f, s in known.items() if s is not None and updates[f] <= updates[folder]]
            sequence = max(below, default=0) + 0.5
        return sequence, updates[folder]

    return sorted(known, key=order, reverse=True)


def newest_sequence(run: Path) -> int:
    """The highest number of a save in a run, 0 where there is none."""
    if not run.is_dir():
        return 0
    return max((_sequence(folder) or 0 for folder in layout.checkpoint_folders(run)), default=0)


def _sequence(folder: Path) -> int | None:
    try:
        return parse_manifest(fsio.read_regular(folder / layout.MANIFEST)).sequence
    except (OSError, ManifestError):
        return None


def update_of(folder: Path) -> tuple[int, int]:
    """(update, epoch) by the folder's name, else by its running states, else (-1, -1)."""
    numbers = layout.parse_folder_name(folder.name)
    if numbers is None:
        inspection = Inspection(folder, "structure")
        list(structure.check_running_states(inspection))
        c = inspection.counters
        numbers = (c.epoch, c.actual_update_step) if c else (-1, -1)
    return numbers[1], numbers[0]


def verify_run(
    run: Path | str,
    level: Level = "digest",
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    networks: NetworkShapes | None = None,
) -> RunReport:
    """Judge all checkpoints of a run and say which one a resume takes.

    Raises:
        CheckpointError: there is no such folder.
    """
    run = Path(run)
    if not run.is_dir():
        raise CheckpointError(f"`{run}` does not exist", allowed="a run's folder")
    rows = [
        verify(folder, level, progress=progress, threads=threads, networks=networks)
        for folder in layout.checkpoint_folders(run)
    ]
    good = {row.path for row in rows if row.is_good}
    resume_from = next((path for path in newest_first(row.path for row in rows) if path in good), None)
    return RunReport(run, level, rows, resume_from)
