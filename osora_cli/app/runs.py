"""A run's folder: where it is, whether it may be used, and what a run goes on from."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from osora_cli import __version__
from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.layout import RUN_FILE, checkpoint_folders, parse_folder_name
from osora_cli.checkpoint.resolve import Resolved, newest_verified, resolve_load
from osora_cli.errors import SetupError, UsageError
from osora_cli.report.jsonl import FILE_NAME as METRICS_FILE

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class RunInfo:
    """Who a run is; written once, when its folder is made."""

    run_id: str
    command: str
    config_name: str
    created: str
    osora: str = __version__


@dataclass
class RunPlan:
    """Where a training writes and what it starts from.

    Attributes:
        folder: the run's folder; `open_folder` makes it.
        info: who the run is.
        start: the checkpoint to go on from, or None.
        in_place: whether `start` is of this very run, so that its records are continued.
        notes: what the user should be told.
    """

    folder: Path
    info: RunInfo
    start: Path | None = None
    in_place: bool = False
    notes: list[str] = field(default_factory=list)


def plan_run(
    *,
    outputs: str,
    exp_name: str | None,
    command: str,
    config_name: str,
    load: Sequence[str],
    resume_auto: bool,
) -> RunPlan:
    """Decide on the folder and the start of a training.

    Raises:
        UsageError: the run exists and is neither resumed nor loaded from.
        CheckpointError: `load` leads to nothing that verifies.
    """
    if resume_auto and exp_name is None:
        raise UsageError("`--resume auto` goes on with a run that has a name", hint="give it one: `--exp-name NAME`")
    name = exp_name or _fresh_name(Path(outputs), config_name)
    if parse_folder_name(name) is not None:
        raise UsageError(f"`{name}` is a checkpoint's name, a run cannot have it", where="exp_name")
    folder = Path(outputs) / name
    if resume_auto and folder.is_dir() and checkpoint_folders(folder):
        # A job that was requeued: its own newest checkpoint, and not once more what it began from.
        own = newest_verified(folder)
        if own is not None:
            return RunPlan(folder, _info(folder, command, config_name), own.path, True, _passed_over(own))
    notes: list[str] = []
    start: Path | None = None
    if load:
        resolved = resolve_load(load)
        start, notes = resolved.path, _passed_over(resolved)
    in_place = start is not None and start.resolve().parent == folder.resolve()
    if _is_run(folder) and not in_place and not resume_auto:
        raise UsageError(
            f"the run `{folder}` exists already",
            hint=f"go on with it: `osora resume {folder}`, or name another: `--exp-name NAME`",
        )
    if resume_auto:
        what = "holds no checkpoint" if _is_run(folder) else "does not exist yet"
        notes.append(f"`--resume auto`: {folder} {what}, the run starts anew")
    return RunPlan(folder, _info(folder, command, config_name), start, in_place or _is_run(folder), notes)


def plan_resume(target: Path) -> RunPlan:
    """Go on with a run: from its newest checkpoint that verifies, or from the one that is named."""
    resolved = resolve_load([str(target)])
    # `.` and links are named by where they lead, for the run is the folder above.
    plain = parse_folder_name(resolved.path.name) is not None and not resolved.path.is_symlink()
    start = resolved.path if plain else resolved.path.resolve()
    folder = start.parent
    return RunPlan(folder, _info(folder, "train vae", folder.name), start, in_place=True, notes=_passed_over(resolved))


def set_aside_later(folder: Path, start: Path) -> list[str]:
    """Move checkpoints that are newer than `start` out of the run's line, so that no later resume takes them.

    Nothing is deleted: they go to `RUN/set-aside-TIME/`, with metrics.jsonl as it was, from which the records of their
    updates are about to be cut. Returns their names.
    """
    started = parse_folder_name(start.name)
    if started is None:
        return []
    later = [p for p in checkpoint_folders(folder) if (n := parse_folder_name(p.name)) and n[1] > started[1]]
    if later:
        aside = folder / time.strftime("set-aside-%Y%m%d-%H%M%S")
        aside.mkdir(exist_ok=True)
        for p in later:
            p.rename(aside / p.name)
        metrics = folder / METRICS_FILE
        if metrics.is_file():
            shutil.copy2(metrics, aside / METRICS_FILE)
    return [p.name for p in later]


@contextmanager
def open_folder(plan: RunPlan) -> Iterator[None]:
    """The run's folder, made and held: no other process may train in it meanwhile.

    The hold is a lock of the operating system on `RUN/.lock`, so it ends with the process, however that ends.

    Raises:
        UsageError: another process trains in it.
        SetupError: it cannot be made or written.
    """
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        with (plan.folder / LOCK_FILE).open("a+", encoding="utf-8") as lock:
            _hold(lock, plan.folder)
            _write_info(plan)
            yield
    except OSError as error:
        if error.filename is None or plan.folder not in (Path(error.filename), Path(error.filename).parent):
            raise
        raise SetupError(
            f"cannot write to `{plan.folder}`: {error.strerror}",
            hint="choose another folder with `--outputs DIR`, or make this one writable, with room in it",
        ) from error


def _hold(lock: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        raise UsageError(
            f"the run `{folder}` is being trained by {owner}", hint="wait for its end, or stop that process"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _write_info(plan: RunPlan) -> None:
    temporary = plan.folder / f".{RUN_FILE}.{os.getpid()}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(plan.info), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(plan.folder / RUN_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def read_info(folder: Path) -> RunInfo | None:
    """Who the run is, or None where `run.json` is missing or is none."""
    try:
        data = json.loads(fsio.read_regular(folder / RUN_FILE))
        return RunInfo(**{name: str(data[name]) for name in RunInfo.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _info(folder: Path, command: str, config_name: str) -> RunInfo:
    found = read_info(folder)
    if found is not None:
        return found
    return RunInfo(uuid.uuid4().hex, command, config_name, time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and any(p.name != LOCK_FILE for p in folder.iterdir())


def _fresh_name(outputs: Path, config_name: str) -> str:
    base = f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, n = base, 1
    while (outputs / name).exists():
        n += 1
        name = f"{base}-{n}"
    return name


def _passed_over(resolved: Resolved) -> list[str]:
    return [f"passed over {path}: {verdict}, {reason}" for path, verdict, reason in resolved.passed_over]
