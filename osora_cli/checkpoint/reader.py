"""Reads a checkpoint: each tensor, or the part of it that a rank owns, straight from its byte range."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.contents import DTYPE_NAMES, TORCH_DTYPES, file_key
from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.headers import ITEMSIZE, Entry, HeaderError, read_header
from osora_cli.checkpoint.layout import GROUPS, GroupLayout
from osora_cli.checkpoint.legacy import load_plain, non_tensor_keys, pickled_step, state_tensors
from osora_cli.checkpoint.manifest import Manifest, ManifestError, parse_manifest
from osora_cli.checkpoint.parallel import map_threads
from osora_cli.checkpoint.structure import find_index, read_index
from osora_cli.errors import CheckpointError
from osora_cli.tensors import TensorShard

_CHUNK = 32 << 20
_SHOWN = 8


@dataclass(frozen=True)
class _InFile:
    """A tensor in a safetensors file; `pickled` for a plain number that Open-Sora stores as pickled bytes."""

    path: Path
    entry: Entry
    pickled: bool = False

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        return (torch.float32, ()) if self.pickled else (TORCH_DTYPES[self.entry.dtype], self.entry.shape)


@dataclass(frozen=True)
class _InMemory:
    """A tensor of a `.bin` file or of `ema.pt`, mapped from the file where that can be."""

    tensor: torch.Tensor

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensor.dtype, tuple(self.tensor.shape)


_Place = _InFile | _InMemory


class CheckpointReader:
    """One checkpoint, osora's own or Open-Sora's.

    It does not verify (see `verify` and `resolve_load`); what it cannot read is a CheckpointError.

    Attributes:
        path: the folder.
        counters: running_states.json.
        manifest: None for a checkpoint of Open-Sora's own.

    Raises:
        CheckpointError: no running_states.json, or a manifest that is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        name = layout.RUNNING_STATES
        try:
            self.counters = Counters.from_json(fsio.read_regular(self.path / name))
        except FileNotFoundError:
            raise CheckpointError(f"`{self.path}` is no checkpoint: it has no `{name}`") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"`{name}` {error}", where=str(self.path)) from None
        self.manifest = self._read_manifest()
        self._places: dict[str, dict[str, _Place]] = {}

    def _read_manifest(self) -> Manifest | None:
        try:
            return parse_manifest(fsio.read_regular(self.path / layout.MANIFEST))
        except FileNotFoundError:
            return None
        except (OSError, ManifestError) as error:
            raise CheckpointError(f"`{layout.MANIFEST}` {error}", where=str(self.path)) from None

    def groups(self) -> list[str]:
        """The groups of tensors that the checkpoint holds."""
        return [name for name in GROUPS if self._group_exists(name)]

    def _group_exists(self, name: str) -> bool:
        group = GROUPS[name]
        if group.folder:
            return (self.path / group.folder).is_dir()
        return (self.path / group.shard(1)).exists() or (name == "ema" and (self.path / layout.EMA_PT).exists())

    def tensors(self, group: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Key (without any prefix) -> dtype and shape of each tensor of a group, in the order of the files.

        Raises:
            CheckpointError: the group is not there or cannot be read.
        """
        return {key: place.kind for key, place in self._group(group).items()}

    def read_into(self, group: str, shards: Iterable[TensorShard], *, cast: bool = False) -> None:
        """Fill each shard's tensor in place with its elements.

        Args:
            group: as in `groups()`.
            shards: what this rank owns, on any device and in any memory format.
            cast: convert where the file has another dtype, instead of refusing.

        Raises:
            CheckpointError: tensors that are missing, or of another shape or dtype, all of them listed; or a file
                that cannot be read.
        """
        wanted = list(shards)
        places = self._group(group)
        faults = []
        work: list[tuple[_Place, TensorShard]] = []
        for shard in wanted:
            key = file_key(group, shard.key)
            place = places.get(key)
            if place is None:
                faults.append(f"`{key}` is missing")
                continue
            dtype, shape = place.kind
            if shape != tuple(shard.shape):
                faults.append(f"`{key}` has shape {list(shape)}, wanted {list(shard.shape)}")
            elif dtype != shard.dtype and not cast:
                faults.append(f"`{key}` has dtype {_dtype(dtype)}, wanted {_dtype(shard.dtype)}")
            elif shard.tensor.numel():
                work.append((place, shard))
        if faults:
            listed = "; ".join(faults[:_SHOWN]) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")
            hint = (
                None if self._group_exists(group) else f"the checkpoint holds {', '.join(self.groups()) or 'nothing'}"
            )
            raise CheckpointError(f"`{group}` does not fit: {listed}", where=str(self.path), hint=hint)
        with torch.no_grad():
            map_threads(lambda item: _fill(*item), work)

    def read_flat(self, group: str, key: str, start: int, count: int) -> torch.Tensor:
        """The elements [start, start + count) of a tensor as [count], in the file's dtype.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        place = self._group(group).get(key)
        if place is None:
            raise CheckpointError(f"`{group}` has no tensor `{key}`", where=str(self.path))
        dtype, shape = place.kind
        values = torch.empty(count, dtype=dtype)
        _fill(place, TensorShard(key, shape, start, values))
        return values

    def param_groups(self, group: str) -> list[dict[str, Any]]:
        """The optimizer's groups, `params` as numbers.

        Raises:
            CheckpointError: not there, or not readable as plain values.
        """
        path = GROUPS[group].param_groups
        content = self._load(path) if path else None
        if not isinstance(content, list) or not all(isinstance(g, dict) for g in content):
            raise CheckpointError(f"`{path or group}` holds no parameter groups", where=str(self.path))
        return content

    def small(self, name: str) -> dict[str, Any] | None:
        """A small state dict ("lr_scheduler", "sampler", "disc_lr_scheduler"), None where there is none."""
        return self._load(name) if (self.path / name).exists() else None

    def rng(self, rank: int) -> dict[str, Any] | None:
        """The generator states of a rank, None where there are none (or where there were fewer ranks)."""
        path = self.path / layout.rng_file(rank)
        if not path.exists():
            return None
        try:
            content = json.loads(fsio.read_regular(path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"`{layout.rng_file(rank)}` cannot be read: {error}", where=str(self.path)) from None
        return content if isinstance(content, dict) else None

    def _load(self, name: str) -> Any:
        try:
            return load_plain(self.path / name)
        except FileNotFoundError:
            raise CheckpointError(f"`{name}` is missing", where=str(self.path)) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"`{name}` {error}", where=str(self.path)) from None

    def _group(self, name: str) -> dict[str, _Place]:
        if name not in self._places:
            if name not in GROUPS or not self._group_exists(name):
                held = ", ".join(self.groups()) or "nothing"
                raise CheckpointError(f"`{self.path}` has no `{name}`", allowed=held)
            try:
                self._places[name] = self._find(name, GROUPS[name])
            except (OSError, ValueError) as error:
                raise CheckpointError(f"`{name}` cannot be read: {error}", where=str(self.path)) from None
        return self._places[name]

    def _find(self, name: str, group: GroupLayout) -> dict[str, _Place]:
        if not group.folder:
            if name == "ema" and not (self.path / group.shard(1)).exists():
                content = load_plain(self.path / layout.EMA_PT)
                return {str(key): _InMemory(tensor) for key, tensor in content.items()}
            return _places_in(self.path / group.shard(1), group.prefix)
        folder = self.path / group.folder
        indexes = find_index(folder)
        if len(indexes) != 1:
            raise ValueError(f"`{group.folder}/` has {len(indexes)} index files, not one")
        places: dict[str, _Place] = {}
        for file in dict.fromkeys(read_index(indexes[0]).values()):
            if file.endswith(".safetensors"):
                places.update(_places_in(folder / file, group.prefix))
            else:
                content = load_plain(folder / file)
                held = state_tensors(content) if group.optimizer else content
                places.update({str(key): _InMemory(tensor) for key, tensor in held.items()})
        return places


def _dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def _places_in(path: Path, prefix: str) -> dict[str, _Place]:
    try:
        header = read_header(path)
    except HeaderError as error:
        raise ValueError(f"`{path.name}`: {error}") from None
    pickled = non_tensor_keys(header)
    return {e.key.removeprefix(prefix): _InFile(path, e, e.key in pickled) for e in header.entries}


def _fill(place: _Place, shard: TensorShard) -> None:
    """Put a shard's elements where they belong."""
    count = shard.tensor.numel()
    target = shard.tensor.detach()
    if isinstance(place, _InMemory):
        source = place.tensor.reshape(-1)[shard.start : shard.start + count]
        target.copy_(source.reshape(target.shape))
        return
    if place.pickled:
        target.fill_(pickled_step(_read(place, 0, place.entry.nbytes)))
        return
    size = ITEMSIZE[place.entry.dtype]
    dtype = TORCH_DTYPES[place.entry.dtype]
    direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
    buffer = target if direct else torch.empty(target.shape, dtype=dtype)
    _read_tensor(place, shard.start * size, buffer)
    if not direct:
        target.copy_(buffer)


def _read(place: _InFile, offset: int, length: int) -> bytes:
    fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, place.entry.begin + offset)
    finally:
        os.close(fd)


def _read_tensor(place: _InFile, offset: int, target: torch.Tensor) -> None:
    """Read bytes from `offset` of a tensor on into a contiguous tensor of the host."""
    array: Any = target.reshape(-1).view(torch.uint8).numpy()
    view = memoryview(array)
    position = place.entry.begin + offset
    fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while view:
            got = os.preadv(fd, [view[:_CHUNK]], position)
            if got <= 0:
                raise CheckpointError(
                    f"`{place.path.name}` ends at byte {position}, inside tensor `{place.entry.key}`",
                    where=str(place.path),
                )
            view = view[got:]
            position += got
    except OSError as error:
        raise CheckpointError(f"`{place.path.name}` cannot be read: {error.strerror}", where=str(place.path)) from None
    finally:
        os.close(fd)
