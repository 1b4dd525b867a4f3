"""How a run says that a signal has ended it, and what that has cost."""

from __future__ import annotations

from pathlib import Path

from osora_cli.checkpoint.events import Saved
from osora_cli.checkpoint.layout import checkpoint_folders
from osora_cli.errors import Interrupted


def stopped(code: int, update: int, run: Path) -> Interrupted:
    """After the save that a signal asked for. `code`: 130 for SIGINT, 143 for SIGTERM."""
    name = "SIGINT" if code == 130 else "SIGTERM"
    what = f"stopped after update {update}, saved" if update else "stopped before the first update"
    return Interrupted(f"{name}: {what}", code, hint=f"to go on: `osora resume {run}`")


def cut_short(update: int, saved: Saved, start: int, run: Path) -> Interrupted:
    """After a second SIGINT, which nobody waits for.

    Args:
        update: updates done.
        saved: what of them the store has saved.
        start: updates done when this process began.
    """
    last = max(start, saved.update or 0)
    if saved.unknown is not None:
        told = f"`osora ckpt verify {run}` says whether it is there"
        what = f"the save of update {saved.unknown} was at its last step, {told}"
    elif last == update:
        what = f"update {update} is saved, nothing is lost" if update else "before the first update"
    elif last + 1 == update:
        what = f"without a save: update {update} is lost"
    else:
        what = f"without a save: updates {last + 1} to {update} are lost"
    hint = f"to go on from update {last}: `osora resume {run}`"
    if saved.unknown is not None:
        hint = f"to go on: `osora resume {run}`"
    elif not checkpoint_folders(run):
        hint = f"`{run}` holds no checkpoint: begin again, under another `--exp-name` or with `--resume auto`"
    return Interrupted(f"second SIGINT: ended at once, {what}", 130, hint=hint, at_once=True)
