"""Whether files exist, asked for very many of them."""

from __future__ import annotations

import os

# From so many questions on, listing a folder once costs less than asking for each file: above all on a network disk.
_LIST_AFTER = 500
# Names of listed folders that are kept, about 100 bytes each.
_MOST_NAMES = 1_000_000


class Presence:
    """Answers `exists` as `os.path.exists` does at the time a folder was first asked for."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._listed: dict[str, frozenset[str] | None] = {}
        self._kept = 0

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that name; a link that leads nowhere does not count."""
        head, slash, name = path.rpartition("/")
        folder = head or ("/" if slash else ".")
        if folder in self._listed:
            names = self._listed[folder]
            # A name that is not listed may still be one, on a disk that does not tell A from a.
            return names is not None and (name in names or os.path.exists(path))
        asked = self._asked[folder] = self._asked.get(folder, 0) + 1
        if asked == 1 and not os.path.isdir(folder):
            self._listed[folder] = None
            return False
        if asked == _LIST_AFTER:
            self._list(folder)
        return os.path.exists(path)

    def _list(self, folder: str) -> None:
        if self._kept >= _MOST_NAMES:
            return
        try:
            with os.scandir(folder) as entries:
                names = frozenset(e.name for e in entries if not e.is_symlink() or os.path.exists(e.path))
        except OSError:
            return
        self._listed[folder] = names
        self._kept += len(names)
