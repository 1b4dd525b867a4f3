"""Frame indexes remembered within a process, so that a clip that is read again is not scanned again."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from osora_cli.data.frame_index import FrameIndex, build_index
from osora_cli.data.media_types import AnyPath, MediaError
from osora_cli.data.streams import error_text

_Key = tuple[str, int, int]


class IndexCache:
    """Indexes of the files read last, bounded by the timestamps held.

    A file that changes (its time of modification or size) is scanned again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._entries: OrderedDict[_Key, FrameIndex] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, path: AnyPath) -> FrameIndex:
        """The index of a video, from the cache or by scanning it.

        Raises:
            MediaError: not a video that can be read.
        """
        key = _key(path)
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found
        index = build_index(path)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = index
                self._held += _cost(index)
            while self._held > self._limit and len(self._entries) > 1:
                _, old = self._entries.popitem(last=False)
                self._held -= _cost(old)
        return index


def _key(path: AnyPath) -> _Key:
    name = os.path.abspath(path)
    try:
        status = Path(name).stat()
    except FileNotFoundError as error:
        raise MediaError(Path(path), "no such file") from error
    except (OSError, ValueError) as error:
        raise MediaError(Path(path), error_text(error)) from error
    return name, status.st_mtime_ns, status.st_size


def _cost(index: FrameIndex) -> int:
    """Numbers of 8 bytes held: the arrays, and about a hundred for the rest of an entry."""
    return 100 + (0 if index.times is None else len(index.times)) + 2 * len(index.key_times)


# 8 MB in each process: some two thousand clips of ten seconds.
_CACHE = IndexCache(limit=1_000_000)


def frame_index(path: AnyPath) -> FrameIndex:
    """The index of a video, remembered in this process until the file changes."""
    return _CACHE.get(path)
