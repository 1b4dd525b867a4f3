"""The small states of a checkpoint as files: written as bytes that were made when the save was asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.comm import Comm
from osora_cli.checkpoint.contents import DTYPE_NAMES, TORCH_DTYPES, CheckpointContents, file_key
from osora_cli.checkpoint.layout import GROUPS
from osora_cli.checkpoint.manifest import DigestRange, FileRecord
from osora_cli.checkpoint.plan import RANGE_LIMIT, PlanError
from osora_cli.checkpoint.staging import byte_view
from osora_cli.tensors import TensorShard


def pack(name: str, state: Any) -> bytes:
    """torch.save of plain values and tensors, proven to load with `weights_only=True`.

    Raises:
        PlanError: it holds something that a restricted load refuses.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise PlanError(f"the state `{name}` holds more than plain values: {reason.strip()}") from None
    return buffer.getvalue()


def small_files(contents: CheckpointContents) -> dict[str, bytes]:
    """Path -> bytes of the parameter groups and schedules, as they are now.

    Raises:
        PlanError: a state that could not be read back.
    """
    files: dict[str, bytes] = {}
    for group, layout in GROUPS.items():
        if layout.param_groups is not None and group in contents.sharded:
            files[layout.param_groups] = pack(group, contents.param_groups[group])
    for name, state in contents.small.items():
        files[name] = pack(name, state)
    return files


def rng_bytes(rng: Mapping[str, Any]) -> bytes:
    """A rank's generator states as JSON."""
    try:
        return (json.dumps(rng, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise PlanError(f"the generator states are no JSON: {error}") from None


def full_tensors(comm: Comm, group: str, shards: Sequence[TensorShard]) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0's host, each in a storage of its own; an empty table on the other ranks.

    With several ranks they come one by one, so that no other rank ever holds more than one tensor of the rest.
    """
    if comm.world_size == 1:
        return {file_key(group, shard.key): _whole(shard) for shard in shards}
    local: dict[str, list[TensorShard]] = {}
    for shard in shards:
        local.setdefault(file_key(group, shard.key), []).append(shard)
    out: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(key for keys in comm.gather(list(local)) for key in keys):
        ranks = comm.gather([_plain_shard(shard) for shard in local.get(key, [])])
        for dtype, shape, start, data in (part for parts in ranks for part in parts):
            if comm.rank:
                continue
            if key not in out:
                out[key] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            begin = start * out[key].element_size()
            if data:
                byte_view(out[key])[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return out


def _whole(shard: TensorShard) -> torch.Tensor:
    if not shard.is_whole:
        raise PlanError(f"`{shard.key}` is not whole on the only rank")
    tensor = shard.tensor.detach().reshape(shard.shape).contiguous().cpu()
    # torch.save writes the whole storage that a view lies in.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _plain_shard(shard: TensorShard) -> tuple[str, tuple[int, ...], int, bytes]:
    data = byte_view(shard.tensor).cpu().numpy().tobytes()
    return DTYPE_NAMES[shard.dtype], tuple(shard.shape), shard.start, data


class _DigestingFile(io.RawIOBase):
    """A file that is written from front to back, and digested in ranges in passing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._ranges: list[DigestRange] = []
        self._digest = xxhash.xxh3_128()
        self._begin = self._position = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            part = view[done : done + self._begin + RANGE_LIMIT - self._position]
            try:
                fsio.write_all(self._file.fileno(), part, self._position)
            except OSError as error:
                self.error = OSError(error.errno, error.strerror, self._file.name)
                raise
            self._digest.update(part)
            self._position += len(part)
            done += len(part)
            if self._position - self._begin == RANGE_LIMIT:
                self._end_range()
        return len(view)

    def _end_range(self) -> None:
        if self._position > self._begin:
            length = self._position - self._begin
            self._ranges.append(DigestRange(self._begin, length, self._digest.hexdigest()))
        self._begin = self._position
        self._digest = xxhash.xxh3_128()

    def finish(self) -> FileRecord:
        """Sync and close.

        Raises:
            OSError: the bytes are not on the disk.
        """
        self._end_range()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._position, tuple(self._ranges))

    def close(self) -> None:
        self._file.close()
        super().close()


def write_ema_pt(path: Path, tensors: dict[str, torch.Tensor]) -> FileRecord:
    """`ema.pt`: full shapes, loadable with `weights_only=True`, on the disk when this returns.

    Raises:
        OSError: it could not be written.
    """
    file = _DigestingFile(path)
    try:
        torch.save(tensors, cast(IO[bytes], file))
        return file.finish()
    except RuntimeError as error:
        raise file.error or error from None  # torch hides the reason behind a complaint about positions
    finally:
        file.close()
