"""What a cached latent or text embedding is of: keys made from contents, and which file is which.

A latent's key is a hash of all that it follows from: the autoencoder's digest, the clip's contents, what the table says
of its length and rate, the bucket's shape, and which of its windows it is. No row number and no path is in it, so a
table may be sorted, extended or moved, and what is there already still counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from osora_cli.data.cache_store import Entry
from osora_cli.data.cached_batch import Part

# Windows are drawn for the cache and not for a run: runs of any seed share it.
CACHE_SEED = 0
_BLOCK = 1 << 20


class FileIdentity(NamedTuple):
    """A file by its contents (xxh3_128, hex), and by what is cheap to look at."""

    digest: str
    size: int
    mtime_ns: int


class ClipShape(NamedTuple):
    """How a clip is cut: the shape of its bucket, in frames and pixels."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class WindowRule:
    """What a window hangs on beside the clip: see `ClipLoader`."""

    fps_max: float | None
    rand_sample_interval: int | None


WHOLE: Part = ("head", 0)
"""The whole window, where others of `parts` are its first or last frames."""


def identify(file: Path) -> FileIdentity:
    """Read a file for its digest. Raises OSError."""
    hashed = xxhash.xxh3_128()
    with file.open("rb") as opened:
        stat = os.fstat(opened.fileno())
        while block := opened.read(_BLOCK):
            hashed.update(block)
    return FileIdentity(hashed.hexdigest(), stat.st_size, stat.st_mtime_ns)


def clip_position(digest: str) -> int:
    """Stands for the position in an epoch's order, which a window is drawn from: of the clip alone."""
    return int(digest[:15], 16)


def latent_key(
    model: str,
    clip: str,
    shape: ClipShape,
    *,
    num_frames: int,
    fps: float,
    rule: WindowRule,
    window: int,
    part: Part = WHOLE,
) -> str:
    """Key of a latent, 32 hex digits.

    Args:
        model, clip: digests of autoencoder and file.
        num_frames, fps: as the table says.
        window: which of the clip's windows, from 0.
        part: frames of the window that are encoded by themselves.
    """
    rate = repr(float(fps))
    limit = None if rule.fps_max is None else float(rule.fps_max)
    parts = ["latent", model, clip, *shape, int(num_frames), rate, limit, rule.rand_sample_interval, window, *part]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def text_key(model: str, text: str) -> str:
    """Key of a text's embeddings, 32 hex digits. `model` is the digest of both embedders."""
    return xxhash.xxh3_128_hexdigest(json.dumps(["text", model, text]).encode())


class KnownFiles:
    """Identities of files that have been read before, by the path that stood in the table."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._known: dict[str, list[FileIdentity]] = {}
        for entry in entries:
            path, file = entry.facts.get("path"), entry.facts.get("file")
            if isinstance(path, str) and isinstance(file, list) and len(file) == 3:
                self.add(path, FileIdentity(str(file[0]), int(file[1]), int(file[2])))

    def add(self, path: str, identity: FileIdentity) -> None:
        known = self._known.setdefault(path, [])
        if identity not in known:
            known.append(identity)

    def find(self, path: str, files: Iterable[Path]) -> FileIdentity | None:
        """Which contents the first of `files` that exists has; it is read only if size or time are not known.

        Without any file: what was known of the path last, so that a cache serves without its clips; None if nothing.

        Raises:
            OSError: the file cannot be read.
        """
        known = self._known.get(path, [])
        for file in files:
            try:
                stat = file.stat()
            except FileNotFoundError:
                continue
            for identity in reversed(known):
                if (identity.size, identity.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                    return identity
            identity = identify(file)
            self.add(path, identity)
            return identity
        return known[-1] if known else None
