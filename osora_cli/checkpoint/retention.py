"""Which checkpoints of a run may go. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from osora_cli.checkpoint import layout
from osora_cli.checkpoint.leftovers import dispose, move_to_trash
from osora_cli.checkpoint.verify import is_good, newest_first, update_of


def permanent(folders: Iterable[Path], every: int) -> set[Path]:
    """The first checkpoint of every so many updates: of those at [every, 2 every), of [2 every, 3 every), ...

    Since the first of a stretch stays, the choice does not change as checkpoints come and go. `every` 0: none.
    """
    first: dict[int, Path] = {}
    for folder in sorted(folders, key=update_of):
        stretch = update_of(folder)[0] // every if every > 0 else 0
        if stretch > 0:
            first.setdefault(stretch, folder)
    return set(first.values())


class Retention:
    """Keeps the newest checkpoints that verify.

    Only checkpoints that osora wrote and that verify (by structure) are counted or removed: what is damaged,
    incomplete or foreign is neither kept in place of a good one nor thrown away.

    Args:
        run_dir: the run.
        keep: how many stay, at least one; -1: all.
        protected: a checkpoint that is never removed (the one the run was resumed from).
        keep_every: the first checkpoint of every so many updates is never removed, and counts in `keep` only while
            it is among the newest; 0: none.
    """

    def __init__(self, run_dir: Path, keep: int, protected: Path | None, keep_every: int = 0) -> None:
        self._run_dir = run_dir
        self._keep = keep if keep < 0 else max(1, keep)
        self._protected = protected.resolve() if protected is not None else None
        self._keep_every = keep_every
        self._verified: dict[Path, int] = {}  # -> modification time of its manifest when it was last verified

    def surplus(self, newest: Path) -> list[Path]:
        """The checkpoints to remove, oldest first; never `newest`, the one just committed."""
        if self._keep < 0:
            return []
        good = [folder for folder in layout.checkpoint_folders(self._run_dir) if self._is_verified(folder)]
        ordered = [folder for folder in newest_first(good) if folder != newest]
        old = ordered[self._keep - 1 :] if newest in good else ordered[self._keep :]
        kept = permanent(good, self._keep_every)
        return [f for f in reversed(old) if f.resolve() != self._protected and f not in kept]

    def _is_verified(self, folder: Path) -> bool:
        try:
            stamp = (folder / layout.MANIFEST).stat().st_mtime_ns
            if self._verified.get(folder) != stamp:
                if not is_good(folder):
                    return False
                self._verified[folder] = stamp
            return True
        except OSError:
            return False

    def remove(self, newest: Path, on_phase: Callable[[str], None]) -> Iterator[tuple[Path, str | None]]:
        """Remove what is surplus; yields (folder, None or why it is still there)."""
        for folder in self.surplus(newest):
            on_phase("trash")
            try:
                dispose(move_to_trash(folder, "retired"))
                yield folder, None
            except OSError as error:
                yield folder, f"{error.strerror or error}"
