"""Rank 0's part of a save once all bytes are written: prove the cover, add the small files, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.events import SaveError
from osora_cli.checkpoint.layout import GROUPS
from osora_cli.checkpoint.leftovers import dispose, move_to_trash, trash_name
from osora_cli.checkpoint.manifest import DigestRange, FileRecord, Manifest, dump_manifest, whole_record
from osora_cli.checkpoint.owner import write_owner
from osora_cli.checkpoint.plan import Plan
from osora_cli.checkpoint.smallfiles import write_ema_pt
from osora_cli.checkpoint.steps import read_steps
from osora_cli.checkpoint.tensor_files import Ranges


@dataclass
class SmallState:
    """Everything of a checkpoint that is not in the planned tensor files, as it was when the save was asked for.

    Attributes:
        counters: of the run.
        files: path -> bytes: indexes, groups, schedules, RNG states.
        ema: whole tensors for `ema.pt`, None where EMA is in the plan (asynchronous mode) or not kept.
        parts: what the checkpoint holds.
        provenance: for the manifest.
    """

    counters: Counters
    files: dict[str, bytes]
    ema: dict[str, torch.Tensor] | None
    parts: tuple[str, ...]
    provenance: dict[str, object]


def cover(plan: Plan, reports: list[Ranges], staging: Path) -> dict[str, FileRecord]:
    """One record a planned file from the ranks' reports.

    Raises:
        SaveError: a byte that no rank wrote or that two did, or a file of the wrong size.
    """
    records: dict[str, FileRecord] = {}
    for file in plan.files:
        parts = sorted((DigestRange(*part) for report in reports for part in report.get(file.path, [])), key=_offset)
        record = FileRecord(file.size, tuple(parts))
        gap = record.gaps()
        size = (staging / file.path).stat().st_size
        if gap is None and size != file.size:
            gap = f"the file has {size} bytes, not {file.size}"
        if gap is not None:
            raise SaveError(f"`{file.path}` was not written whole: {gap}")
        records[file.path] = record
    return records


def _offset(part: DigestRange) -> int:
    return part.offset


def optimizer_lag(plan: Plan, staging: Path, counters: Counters) -> dict[str, int]:
    """By how many updates each optimizer's own step is behind the run's, read from the files as they were written."""
    highest: dict[str, float] = {}
    for file in plan.files:
        if GROUPS[file.group].optimizer:
            steps = [step for _, step in read_steps(staging / file.path, file.header)]
            highest[file.group] = max([highest.get(file.group, 0.0), *steps]) if steps else highest.get(file.group, 0.0)
    return {group: counters.actual_update_step - int(step) for group, step in highest.items()}


class Commit:
    """The last steps, on rank 0.

    Args:
        run_dir: the run.
        staging: the staging folder, all tensor files in it written and synced.
        small: the rest of the checkpoint.
        async_io: whether files were written in the background.
        on_phase: called before each step.

    Attributes:
        final: the checkpoint's name.
        published: whether it stands under that name; the disk may not know yet.
    """

    def __init__(
        self, run_dir: Path, staging: Path, small: SmallState, *, async_io: bool, on_phase: Callable[[str], None]
    ) -> None:
        self._run_dir = run_dir
        self._staging = staging
        self._small = small
        self._async_io = async_io
        self._phase = on_phase
        self._replaced: Path | None = None
        self.final = run_dir / small.counters.folder
        self.published = False

    def write_small_files(self, background_files: int) -> dict[str, FileRecord]:
        """All files but the planned ones and the manifest, running_states.json last.

        Raises:
            OSError: one could not be written.
        """
        files = dict(self._small.files)
        if self._async_io:
            own = f"{layout.ASYNC_LOG_LINE}\n".encode() * background_files
            log = self._staging / layout.ASYNC_LOG
            files[layout.ASYNC_LOG] = (log.read_bytes() if log.exists() else b"") + own
        files[layout.RUNNING_STATES] = self._small.counters.to_json()
        records: dict[str, FileRecord] = {}
        if self._small.ema is not None:
            self._phase("small-files")
            records[layout.EMA_PT] = write_ema_pt(self._staging / layout.EMA_PT, self._small.ema)
        for name, data in files.items():
            self._phase("small-files")
            path = self._staging / name
            path.parent.mkdir(exist_ok=True)
            fsio.write_durable(path, data)
            records[name] = whole_record(data)
        return records

    def write_manifest(self, manifest: Manifest) -> int:
        """The manifest, then every name in the staging folder, are on the disk. Returns the manifest's size."""
        self._phase("manifest")
        data = dump_manifest(manifest)
        fsio.replace_durable(self._staging / layout.MANIFEST, data)
        self._phase("fsync-folders")
        for folder in sorted(path for path in self._staging.iterdir() if path.is_dir()):
            fsio.sync_folder(folder)
        fsio.sync_folder(self._staging)
        return len(data)

    def publish(self) -> None:
        """Give the folder its final name. An existing checkpoint of that name goes to the trash in the same step,
        where the filesystem can swap names; else just before, and comes back if that is as far as it gets.

        Raises:
            OSError: it could not be renamed; what was there before is still there.
        """
        swapped = False
        if self.final.exists():
            self._phase("replace")
            swapped = self._swap()
        if not swapped:
            self._phase("commit-rename")
            try:
                self._staging.rename(self.final)
            except OSError:
                if self._replaced is not None:
                    self._replaced.rename(self.final)
                raise
        self.published = True
        self._phase("fsync-run")
        fsio.sync_folder(self._run_dir)
        (self.final / layout.OWNER).unlink(missing_ok=True)

    def _swap(self) -> bool:
        """Swap the old checkpoint with the new one, which stands under a trash name for a moment. Where that cannot
        be done in one step, only move the old one away and return False."""
        write_owner(self.final, "replaced")
        trash = trash_name(self.final)
        self._staging.rename(trash)
        self._phase("commit-rename")
        if fsio.exchange(trash, self.final):
            self._replaced = trash
            return True
        trash.rename(self._staging)
        self._replaced = move_to_trash(self.final, "replaced")
        return False

    def point_latest(self) -> None:
        """`latest` names the checkpoint, at once and for good."""
        self._phase("latest")
        fsio.replace_durable(self._run_dir / layout.LATEST, f"{self.final.name}\n".encode())

    def drop_replaced(self) -> None:
        """Delete the checkpoint that had this name before.

        Raises:
            OSError: something of it could not be deleted.
        """
        if self._replaced is not None:
            self._phase("trash")
            dispose(self._replaced)
