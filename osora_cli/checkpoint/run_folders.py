"""Folders of runs: what a run looks like from outside, and the runs in a folder that was named in a run's place."""

from __future__ import annotations

from pathlib import Path

from osora_cli.checkpoint import layout

_OF_A_RUN = (layout.RUN_FILE, "config.yaml", "config.txt", "metrics.jsonl")


def looks_like_run(path: Path) -> bool:
    """A run, also one whose first checkpoint is still to come."""
    return path.is_dir() and (
        any((path / name).exists() for name in _OF_A_RUN) or bool(layout.checkpoint_folders(path))
    )


def runs_within(path: Path) -> list[Path]:
    """The runs that are a folder's own folders, the one that was written to last first."""
    try:
        found = [child for child in path.iterdir() if looks_like_run(child)]
    except OSError:
        return []
    return sorted(found, key=lambda run: max(p.stat().st_mtime for p in (run, *run.iterdir())), reverse=True)


def told_of_runs(path: Path) -> str | None:
    """What to say of a folder that holds runs and is none; None where it holds none."""
    if looks_like_run(path):
        return None
    found = runs_within(path)
    if not found:
        return None
    runs = "1 run" if len(found) == 1 else f"{len(found)} runs, the newest"
    return f"it holds {runs}: name `{found[0]}`"
