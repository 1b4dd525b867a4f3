"""Tensors kept under keys, in safetensors files that stand as they are once they are there.

A store is a folder of shards. A shard is written under another name, synced, and renamed: whoever is killed leaves
either a whole shard or none. Each shard's header says what is in it (keys, facts, digests of every tensor), so the
shards alone are the truth; `index.parquet` repeats their headers, to be read faster, and is made again when it does not
fit them. Several processes write into one store at a time, each its own shards.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from osora_cli.errors import DataError, SetupError

INDEX = "index.parquet"
_SUFFIX = ".safetensors"
_WRITING = ".writing-"
_HEADER = "osora_cache"
_OPEN_FILES = 16


@dataclass(frozen=True)
class Entry:
    """What the store knows of a key: the shard that holds it, facts about it, and the digest of each tensor."""

    key: str
    shard: str
    facts: Mapping[str, Any]
    digests: Mapping[str, str]


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 over dtype, shape and bytes, in hex."""
    hashed = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class StoreWriter:
    """Collects entries and writes them as shards.

    Args:
        folder: the store's; made if it is not there.
        rank: of this process; its unfinished shard bears it, and takes the place of one that a killed process left.
        max_bytes: tensors of a shard; one is written as soon as it holds so much.

    Raises:
        SetupError: from every call: the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, rank: int = 0, max_bytes: int = 256 << 20) -> None:
        self._folder, self._rank, self._max_bytes = folder, rank, max_bytes
        self._entries: dict[str, tuple[dict[str, torch.Tensor], Mapping[str, Any]]] = {}
        self._bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def add(self, key: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Path | None:
        """Take an entry; the shard, if one was written because it is full."""
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._entries[key] = (kept, facts)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        return self.flush() if self._bytes >= self._max_bytes else None

    def flush(self) -> Path | None:
        """Write what has been taken since the last shard; None if that is nothing."""
        if not self._entries:
            return None
        name = xxhash.xxh3_64_hexdigest("".join(sorted(self._entries)).encode()) + _SUFFIX
        unfinished = self._folder / f"{_WRITING}{self._rank:05d}"
        try:
            tensors, described = self._contents()
            save_file(tensors, unfinished, metadata={_HEADER: json.dumps(described, sort_keys=True)})
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(self._folder / name)
            _sync_folder(self._folder)
        except (OSError, SafetensorError) as error:
            raise cannot_write(self._folder, error) from error
        self._entries, self._bytes = {}, 0
        return self._folder / name

    def _contents(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        tensors: dict[str, torch.Tensor] = {}
        described: list[dict[str, Any]] = []
        for key, (held, facts) in self._entries.items():
            tensors |= {f"{key}/{name}": tensor for name, tensor in held.items()}
            digests = {name: tensor_digest(tensor) for name, tensor in held.items()}
            described.append({"key": key, "facts": dict(facts), "digests": digests})
        return tensors, described


@dataclass
class Store:
    """A store as it was when it was opened.

    Attributes:
        folder: its shards are in it.
        entries: by key.
        damaged: shards that cannot be read, with the reason; nothing of them is among the entries.
    """

    folder: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    _open: OrderedDict[str, Any] = field(default_factory=OrderedDict, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Read what is there; a folder that does not exist is an empty store."""
        store = cls(folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob(f"*{_SUFFIX}"))}
        indexed = _read_index(folder / INDEX)
        for name, size in sizes.items():
            known = indexed.get((name, size))
            if known is not None:
                store.entries.update({entry.key: entry for entry in known})
                continue
            try:
                store.entries.update({entry.key: entry for entry in _read_header(folder, name)})
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                store.damaged[name] = str(error)
        return store

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of an entry, each compared with its digest.

        Raises:
            DataError: they cannot be read, or are not what was written.
        """
        entry = self.entries[key]
        try:
            file = self._file(entry.shard)
            tensors = {name: file.get_tensor(f"{key}/{name}") for name in entry.digests}
        except (OSError, SafetensorError) as error:
            raise self._damage(entry, str(error)) from error
        for name, tensor in tensors.items():
            if tensor_digest(tensor) != entry.digests[name]:
                raise self._damage(entry, f"tensor `{name}` is not what was written")
        return tensors

    def write_index(self) -> None:
        """Write `index.parquet`: a row for each entry, with its shard, facts and digests.

        Raises:
            SetupError: it cannot be written.
        """
        rows = [entry for entry in self.entries.values() if (self.folder / entry.shard).exists()]
        sizes = {name: (self.folder / name).stat().st_size for name in {entry.shard for entry in rows}}
        table = pa.table(
            {
                "shard": pa.array([entry.shard for entry in rows], pa.string()),
                "shard_bytes": pa.array([sizes[entry.shard] for entry in rows], pa.int64()),
                "key": pa.array([entry.key for entry in rows], pa.string()),
                "facts": pa.array([json.dumps(entry.facts, sort_keys=True) for entry in rows], pa.string()),
                "digests": pa.array([json.dumps(entry.digests, sort_keys=True) for entry in rows], pa.string()),
            }
        )
        unfinished = self.folder / f"{_WRITING}index-{os.getpid()}"
        try:
            pq.write_table(table, unfinished)
            unfinished.replace(self.folder / INDEX)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _file(self, shard: str) -> Any:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        opened = safe_open(self.folder / shard, framework="pt")
        self._open[shard] = opened
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return opened

    def _damage(self, entry: Entry, reason: str) -> DataError:
        return DataError(
            f"shard `{self.folder / entry.shard}` of the cache is damaged: {reason}",
            hint=f"remove the file, and run the same `osora data cache` again: it makes anew what is missing\n"
            f"  rm {self.folder / entry.shard}",
        )


def remove_unfinished(folder: Path, ranks: int) -> None:
    """Remove what killed processes of ranks beyond `ranks` have left; each other rank overwrites its own."""
    for path in folder.glob(f"{_WRITING}*"):
        rank = path.name[len(_WRITING) :]
        if rank.isdigit() and int(rank) >= ranks:
            path.unlink(missing_ok=True)


def _read_index(path: Path) -> dict[tuple[str, int], list[Entry]]:
    """Entries by shard and its size; empty where there is no index that can be read."""
    try:
        columns = pq.read_table(path).to_pydict()
        found: dict[tuple[str, int], list[Entry]] = {}
        for shard, size, key, facts, digests in zip(*(columns[name] for name in _COLUMNS), strict=True):
            entry = Entry(key, shard, json.loads(facts), json.loads(digests))
            found.setdefault((shard, size), []).append(entry)
        return found
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return {}


_COLUMNS = ("shard", "shard_bytes", "key", "facts", "digests")


def _read_header(folder: Path, name: str) -> Iterator[Entry]:
    with safe_open(folder / name, framework="pt") as file:
        described = json.loads(file.metadata()[_HEADER])
    return iter([Entry(one["key"], name, one["facts"], one["digests"]) for one in described])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(folder: Path, error: Exception) -> SetupError:
    """What to say of a folder that takes no files."""
    return SetupError(f"the cache `{folder}` cannot be written: {error}", hint="--cache-dir DIR takes another folder")
