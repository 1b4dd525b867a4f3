"""Folders on their way out: the trash, and what dead processes left behind. Knows no torch."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

from osora_cli.checkpoint import fsio, owner
from osora_cli.checkpoint.layout import EVAL, LATEST, OWNER, STAGING_PREFIX, TRASH_PREFIX, parse_folder_name
from osora_cli.checkpoint.verify import is_good


def new_id() -> str:
    return secrets.token_hex(4)


def trash_name(folder: Path) -> Path:
    return folder.with_name(f"{TRASH_PREFIX}{folder.name}-{new_id()}")


def move_to_trash(folder: Path, purpose: owner.Purpose) -> Path:
    """Rename a checkpoint to `.trash-{name}-{id}`: from then on it is no checkpoint, in one step.

    Raises:
        OSError: it could not be renamed; it is where it was.
    """
    owner.write_owner(folder, purpose)
    return folder.rename(trash_name(folder))


def dispose(trash: Path) -> None:
    """Delete a `.trash-*` folder. Pictures in its `eval/` go back to where they were, and stay there alone.

    Raises:
        OSError: something could not be deleted.
    """
    if (trash / EVAL).is_dir():
        home = _home(trash)
        if home is None:
            return
        _rescue(trash / EVAL, home / EVAL)
    # The owner file goes last, so that a clean-up at the same time sees whose folder this is.
    for entry in trash.iterdir():
        if entry.name == OWNER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            fsio.remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    fsio.remove_tree(trash)


def _rescue(pictures: Path, home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    if not home.exists():
        pictures.rename(home)
    else:  # a newer checkpoint of that name has pictures of its own, which stay
        for picture in pictures.iterdir():
            if not (home / picture.name).exists():
                picture.rename(home / picture.name)
    fsio.sync_folder(home.parent)


def _home(trash: Path) -> Path | None:
    """Where a folder in the trash was: RUN/epoch0-global_step3 for RUN/.trash-epoch0-global_step3-1f2e3d4c."""
    name = trash.name.removeprefix(TRASH_PREFIX).rpartition("-")[0]
    return trash.with_name(name) if parse_folder_name(name) else None


def clean_leftovers(run_dir: Path) -> list[Path]:
    """Remove the `.staging-*` and `.trash-*` folders of dead owners; those of live ones are never touched.

    A replaced checkpoint whose successor never took its place is put back, not removed: that is what is left when a
    process dies between two renames on a filesystem that cannot swap names in one step.

    Returns:
        The folders that are gone.
    """
    removed: list[Path] = []
    if not run_dir.is_dir():
        return removed
    for half_written in run_dir.glob(f".{LATEST}.*.tmp"):
        with suppress(OSError):
            if time.time() - half_written.stat().st_mtime > owner.DEAD_AFTER_S:
                half_written.unlink()
    for folder in sorted(run_dir.iterdir()):
        if not folder.name.startswith((STAGING_PREFIX, TRASH_PREFIX)) or folder.is_symlink() or not folder.is_dir():
            continue
        if owner.is_live(folder):
            continue
        with suppress(OSError):  # another process is at it, or it belongs to another user: nothing to end a run for
            _clean(folder)
        if not folder.exists():
            removed.append(folder)
    return removed


def _clean(folder: Path) -> None:
    if folder.name.startswith(STAGING_PREFIX):
        fsio.remove_tree(folder)
        return
    home = _home(folder)
    who = owner.read_owner(folder)
    # Without an owner (a power cut may take its name) nobody can say why a whole checkpoint is here: back it goes.
    if home is not None and not home.exists() and (who is None or who.purpose == "replaced") and is_good(folder):
        (folder / OWNER).unlink(missing_ok=True)
        folder.rename(home)
        fsio.sync_folder(home.parent)
        return
    dispose(folder)
