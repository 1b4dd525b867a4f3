"""Which checkpoint to go on from: the newest that verifies. Knows no torch."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from osora_cli.checkpoint import layout
from osora_cli.checkpoint.findings import Level, Verdict
from osora_cli.checkpoint.run_folders import told_of_runs
from osora_cli.checkpoint.verify import is_checkpoint, newest_first, update_of, verify
from osora_cli.errors import CheckpointError

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

PassedOver = tuple[Path, Verdict, str]


@dataclass(frozen=True)
class Resolved:
    """A checkpoint that verifies, and the newer ones that do not: (path, verdict, reason)."""

    path: Path
    passed_over: list[PassedOver] = field(default_factory=list)


def newest_verified(run_dir: Path | str, level: Level = "digest") -> Resolved | None:
    """The checkpoint of a run that a resume takes; None where the run has none at all.

    Raises:
        CheckpointError: there are checkpoints, and none of them verifies.
    """
    run_dir = Path(run_dir)
    folders = layout.checkpoint_folders(run_dir) if run_dir.is_dir() else []
    return _first_good(newest_first(folders), str(run_dir), level)


def resolve_load(paths: Sequence[str], level: Level = "digest") -> Resolved:
    """The newest checkpoint that verifies among what the paths name.

    Args:
        paths: checkpoints, runs, or wildcards of either (quoted, or already expanded by the shell).
        level: how far each is verified.

    Raises:
        CheckpointError: a path that matches nothing or holds no checkpoint, or none that verifies.
    """
    candidates: dict[Path, None] = {}
    for text in paths:
        for path in _matches(text):
            candidates.update(dict.fromkeys(_checkpoints(path, alone=len(paths) == 1)))
    named = ", ".join(f"`{text}`" for text in paths)
    if not candidates:
        raise CheckpointError(f"{named} holds no checkpoint", allowed="a folder with `running_states.json`, or a run")
    found = _first_good(_order(list(candidates)), named, level)
    if found is None:
        raise CheckpointError(f"{named} holds no checkpoint: only what is left of pruned ones")
    return found


def _matches(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.exists():
        return [path]
    if glob.has_magic(text):
        found = sorted(Path(name) for name in glob.glob(str(path)))
        if found:
            return found
        raise CheckpointError(f"`{text}` matches nothing", allowed="a checkpoint, a run, or a wildcard of them")
    raise CheckpointError(f"`{text}` does not exist", allowed="a checkpoint, a run, or a wildcard of them")


def _checkpoints(path: Path, *, alone: bool) -> list[Path]:
    """The checkpoints that a path stands for: itself, or those of the run."""
    if is_checkpoint(path):
        return [path]
    folders = layout.checkpoint_folders(path) if path.is_dir() else []
    if not folders and alone:
        what = "is no folder" if path.is_file() else f"has no `{layout.RUNNING_STATES}` and no checkpoints in it"
        raise CheckpointError(
            f"`{path}` {what}", allowed="a checkpoint or a run", hint=told_of_runs(path) or _told_of_weights(path)
        )
    return folders


def _told_of_weights(path: Path) -> str | None:
    """What to say of a file of weights, or a folder with one, in a checkpoint's place; None where there is none."""
    files = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    if not any(file.suffix in _WEIGHTS for file in files):
        return None
    return f"weights alone are no checkpoint: a training starts from them by `--model.from-pretrained {path}`"


def _order(candidates: list[Path]) -> list[Path]:
    """Newest first. Saves are numbered within a run; between runs the update decides."""
    runs = {path.resolve().parent for path in candidates}
    if len(runs) == 1:
        return newest_first(candidates)
    return sorted(candidates, key=update_of, reverse=True)


def _first_good(ordered: Sequence[Path], named: str, level: Level) -> Resolved | None:
    passed: list[PassedOver] = []
    for path in ordered:
        report = verify(path, level)
        if report.is_good:
            return Resolved(path, passed)
        if report.verdict != "pruned":
            passed.append((path, report.verdict, report.reason))
    if not passed:
        return None
    lines = "; ".join(f"`{path.name}` is {verdict}: {reason}" for path, verdict, reason in passed)
    raise CheckpointError(
        f"no checkpoint of {named} verifies: {lines}", hint=f"osora ckpt verify {passed[0][0].parent}"
    )
