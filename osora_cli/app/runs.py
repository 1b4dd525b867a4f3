"""A run's folder: where it is, whether it may be used, and what a run goes on from."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from osora_cli import __version__
from osora_cli.checkpoint.layout import checkpoint_folders, parse_folder_name
from osora_cli.checkpoint.resolve import Resolved, newest_verified, resolve_load
from osora_cli.errors import SetupError, UsageError

RUN_FILE = "run.json"


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
    name = exp_name or _fresh_name(Path(outputs), config_name)
    folder = Path(outputs) / name
    notes: list[str] = []
    start: Path | None = None
    if load:
        resolved = resolve_load(load)
        start, notes = resolved.path, _passed_over(resolved)
    in_place = start is not None and start.resolve().parent == folder.resolve()
    if _is_run(folder) and not in_place:
        if not resume_auto:
            raise UsageError(
                f"the run `{folder}` exists already",
                hint=f"go on with it: `osora resume {folder}`, or name another: `--exp-name NAME`",
            )
        if start is None:
            found = newest_verified(folder)
            notes += _passed_over(found) if found else []
            start = found.path if found else None
            if start is None:
                notes.append(f"`--resume auto`: {folder} holds no checkpoint that verifies, the run starts anew")
        in_place = True
    elif resume_auto and start is None:
        notes.append(f"`--resume auto`: {folder} does not exist yet, the run starts anew")
    return RunPlan(folder, _info(folder, command, config_name), start, in_place, notes)


def plan_resume(target: Path) -> RunPlan:
    """Go on with a run: from its newest checkpoint that verifies, or from the one that is named."""
    resolved = resolve_load([str(target)])
    folder = resolved.path.parent
    return RunPlan(
        folder, _info(folder, "train vae", folder.name), resolved.path, in_place=True, notes=_passed_over(resolved)
    )


def set_aside_later(folder: Path, start: Path) -> list[str]:
    """Move checkpoints that are newer than `start` out of the run's line, so that no later resume takes them.

    Nothing is deleted: they go to `RUN/set-aside-TIME/`. Returns their names.
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
    return [p.name for p in later]


def open_folder(plan: RunPlan) -> None:
    """Make the run's folder and say in it who the run is. Raises SetupError where that cannot be."""
    folder = plan.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{RUN_FILE}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(asdict(plan.info), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / RUN_FILE)
    except OSError as error:
        raise SetupError(
            f"cannot write to `{folder}`: {error.strerror}",
            hint="choose another folder with `--outputs DIR`, or give this one write permission",
        ) from error


def read_info(folder: Path) -> RunInfo | None:
    """Who the run is, or None for a folder without `run.json`."""
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    return RunInfo(**json.loads(path.read_text(encoding="utf-8")))


def _info(folder: Path, command: str, config_name: str) -> RunInfo:
    found = read_info(folder)
    if found is not None:
        return found
    return RunInfo(uuid.uuid4().hex, command, config_name, time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _fresh_name(outputs: Path, config_name: str) -> str:
    base = f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, n = base, 1
    while (outputs / name).exists():
        n += 1
        name = f"{base}-{n}"
    return name


def _passed_over(resolved: Resolved) -> list[str]:
    return [f"passed over {path}: {verdict}, {reason}" for path, verdict, reason in resolved.passed_over]
