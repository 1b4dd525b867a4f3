"""A network's weights out of a checkpoint, as files that other tools read: streamed, and there whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.contents import DTYPE_NAMES
from osora_cli.checkpoint.headers import ITEMSIZE, build_header
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.staging import byte_view

CHUNK = 4 << 20  # elements in memory at once
INDEX = "model.safetensors.index.json"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedFile:
    """A file as it was written: its path below the output, size in bytes, and xxh3_128 in hex."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class _Tensor:
    group: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEMSIZE[self.dtype] * prod(self.shape)


class Export:
    """What is to be written.

    Args:
        reader: the checkpoint.
        group: one that it holds: "model", "ema", "master", "discriminator". What EMA and masters do not have of the
            network (buffers are no parameters) comes from "model".
        dtype: of all floating tensors; None: as they are.
    """

    def __init__(self, reader: CheckpointReader, group: str, dtype: torch.dtype | None) -> None:
        self._reader = reader
        self._dtype = dtype
        tables = {group: reader.tensors(group)}
        if group in ("ema", "master") and "model" in reader.groups():
            tables["model"] = {k: kind for k, kind in reader.tensors("model").items() if k not in tables[group]}
        self.tensors = [
            _Tensor(name, key, DTYPE_NAMES[dtype if dtype and kind.is_floating_point else kind], shape)
            for name, table in tables.items()
            for key, (kind, shape) in table.items()
        ]
        self.total_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def to_file(self, path: Path, progress: Progress | None = None) -> list[ExportedFile]:
        """All tensors in one safetensors file, which must not exist.

        Raises:
            OSError: it could not be written; nothing is left.
            CheckpointError: a tensor could not be read; nothing is left.
        """
        with _temporary(path) as temporary:
            written = self._write(temporary, self.tensors, _Meter(self.total_bytes, progress))
            _publish(temporary, path)
        return [ExportedFile(path.name, *written)]

    def to_folder(self, path: Path, shard_bytes: int, progress: Progress | None = None) -> list[ExportedFile]:
        """Hugging Face's layout in a folder that must not exist: `model.safetensors`, or where that would pass
        `shard_bytes` `model-00001-of-0000N.safetensors` with an index.

        Raises:
            OSError, CheckpointError: as `to_file`.
        """
        shards = list(_shards(self.tensors, shard_bytes))
        meter = _Meter(self.total_bytes, progress)
        files: list[ExportedFile] = []
        with _temporary(path) as temporary:
            temporary.mkdir()
            weight_map: dict[str, str] = {}
            for number, shard in enumerate(shards, start=1):
                several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                name = f"model{several}.safetensors"
                files.append(ExportedFile(name, *self._write(temporary / name, shard, meter)))
                weight_map.update({tensor.key: name for tensor in shard})
            if len(shards) > 1:
                index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
                data = (json.dumps(index, indent=2) + "\n").encode()
                fsio.write_durable(temporary / INDEX, data)
                files.append(ExportedFile(INDEX, len(data), xxhash.xxh3_128_hexdigest(data)))
            fsio.sync_folder(temporary)
            _publish(temporary, path)
        return files

    def _write(self, path: Path, tensors: Sequence[_Tensor], meter: _Meter) -> tuple[int, str]:
        """Returns size and digest of the file, which is on the disk then."""
        # Wide dtypes first: readers map the file, and need every tensor at a multiple of its item size.
        ordered = sorted(tensors, key=lambda tensor: -ITEMSIZE[tensor.dtype])
        raw, header = build_header([(t.key, t.dtype, t.shape) for t in ordered])
        digest = xxhash.xxh3_128(raw)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fsio.write_all(fd, raw, 0)
            position = len(raw)
            for tensor in ordered:
                for data in self._chunks(tensor):
                    digest.update(data)
                    fsio.write_all(fd, data, position)
                    fsio.start_writeback(fd, position, len(data))
                    position += len(data)
                    meter.add(len(data))
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(fd)
        return header.end, digest.hexdigest()

    def _chunks(self, tensor: _Tensor) -> Iterator[memoryview]:
        count = prod(tensor.shape)
        for start in range(0, count, CHUNK):
            values = self._reader.read_flat(tensor.group, tensor.key, start, min(CHUNK, count - start))
            if self._dtype is not None and values.dtype.is_floating_point:
                values = values.to(self._dtype)
            array: Any = byte_view(values).numpy()
            yield memoryview(array)


class _Meter:
    """Bytes that are done, told after each step."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _shards(tensors: Sequence[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    """In order, closed before the next tensor would pass the limit."""
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _publish(temporary: Path, path: Path) -> None:
    temporary.rename(path)
    fsio.sync_folder(path.parent)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`; what stands there is gone in the end."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            fsio.remove_tree(temporary)
        else:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
