"""A rank's bytes of a checkpoint, cut into pieces that fit the staging buffers."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from osora_cli.checkpoint.contents import file_key
from osora_cli.checkpoint.headers import ITEMSIZE
from osora_cli.checkpoint.plan import Plan, Segment
from osora_cli.checkpoint.staging import HostCopier, byte_view
from osora_cli.tensors import TensorShard

# Running statistics and the like are small; a forward pass changes them before the next update waits for the copy.
_CLONED_GROUPS = ("model", "discriminator")
_CLONE_BYTES = 1 << 16


@dataclass(eq=False)
class Source:
    """Bytes [begin, end) of a file, held by this rank in a tensor."""

    begin: int
    end: int
    tensor: torch.Tensor
    cloned: bool = False
    row_major: torch.Tensor | None = None
    left: int = 0

    def bytes(self, offset: int, length: int) -> torch.Tensor:
        """A part as uint8. A copy that row-major order takes is kept until all of it has been asked for."""
        if self.row_major is None:
            self.row_major = byte_view(self.tensor)
            self.left = self.end - self.begin
        self.left -= length
        view = self.row_major
        if self.left <= 0:
            self.row_major = None
        return view[offset : offset + length]


@dataclass
class Piece:
    """Segments that are staged in one slab, each with the place where it begins there."""

    segments: list[tuple[int, Segment, int]] = field(default_factory=list)  # (number of the file, segment, place)
    size: int = 0


class Snapshot:
    """Where each byte that this rank writes comes from.

    Args:
        plan: the agreed plan.
        rank: this rank.
        sharded: this rank's tensors by group.
        slab_bytes: size of a staging buffer; no segment of the plan is longer.
    """

    def __init__(self, plan: Plan, rank: int, sharded: Mapping[str, Sequence[TensorShard]], slab_bytes: int) -> None:
        self.plan = plan
        self.rank = rank
        self.device = _device(sharded)
        self._sources = _sources(plan, sharded, self.device)
        self._host_tensors = any(
            s.tensor.device.type != "cuda" and not s.cloned for sources in self._sources.values() for s in sources
        )
        self._begins = {number: [s.begin for s in sources] for number, sources in self._sources.items()}
        # Bytes that other ranks hold in pages of this rank: (number of the file, offset) -> bytes.
        self.received: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.pieces = _pieces(plan, rank, slab_bytes)

    @property
    def has_host_tensors(self) -> bool:
        """Whether bytes are to be copied from host memory that the training may change."""
        return self._host_tensors

    def replicas(self) -> list[torch.Tensor]:
        """This rank's tensors of the plan's `replicas`, in their order."""
        found = {(number, s.begin): s.tensor for number, sources in self._sources.items() for s in sources}
        mine = [replica for replica in self.plan.replicas if self.rank in replica.ranks]
        places = [(*self.plan.locations[replica.group, replica.key], replica.start) for replica in mine]
        return [found[number, entry.begin + start * ITEMSIZE[entry.dtype]] for number, entry, start in places]

    def outgoing(self) -> Iterator[tuple[int, int, int, int]]:
        """(rank to send to, number of the file, offset, length) of bytes in pages that another rank writes."""
        for number, file in enumerate(self.plan.files):
            for transfer in file.transfers:
                if transfer.source == self.rank:
                    yield transfer.target, number, transfer.offset, transfer.length

    def fill(self, piece: Piece, slab: torch.Tensor, copier: HostCopier) -> list[torch.Tensor]:
        """Copy a piece into a slab; returns the tensors that must stay alive until the copies are done."""
        kept: list[torch.Tensor] = []
        for number, segment, place in piece.segments:
            end = segment.offset + segment.length
            parts = self.copy_range(number, segment.offset, end, slab[place : place + segment.length], copier)
            covered = sum(part.numel() for part in parts)
            for offset, data in self.received[number]:
                if segment.offset <= offset < end:
                    at = place + offset - segment.offset
                    slab[at : at + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
                    covered += len(data)
            if covered != segment.length:  # a slab holds an older save's bytes where nothing is copied
                file = self.plan.files[number].path
                raise RuntimeError(f"{covered} of {segment.length} bytes of `{file}` at {segment.offset} are at hand")
            kept += parts
        return kept

    def copy_range(
        self, number: int, begin: int, end: int, target: torch.Tensor, copier: HostCopier
    ) -> list[torch.Tensor]:
        """Copy what this rank holds of bytes [begin, end) of a file to where it belongs in `target`."""
        kept = []
        sources = self._sources.get(number, [])
        position = max(0, bisect_right(self._begins.get(number, []), begin) - 1)
        for source in sources[position:]:
            if source.begin >= end:
                break
            a, b = max(begin, source.begin), min(end, source.end)
            if a < b:
                part = source.bytes(a - source.begin, b - a)
                copier.copy(target[a - begin : b - begin], part)
                kept.append(part)
        return kept

    def release(self) -> None:
        """Let go of the training's tensors."""
        self._sources.clear()


def _device(sharded: Mapping[str, Sequence[TensorShard]]) -> torch.device | None:
    """The GPU that holds the tensors, None where there is none."""
    found = {s.tensor.device for shards in sharded.values() for s in shards if s.tensor.device.type == "cuda"}
    if len(found) > 1:
        raise ValueError(f"one process has tensors on several GPUs: {sorted(map(str, found))}")
    return next(iter(found), None)


def _sources(
    plan: Plan, sharded: Mapping[str, Sequence[TensorShard]], device: torch.device | None
) -> dict[int, list[Source]]:
    """This rank's tensors by file, in file order. Small ones that may change early are cloned where they lie."""
    sources: dict[int, list[Source]] = defaultdict(list)
    for group, shards in sharded.items():
        for shard in shards:
            if not shard.tensor.numel():
                continue
            number, entry = plan.locations[group, file_key(group, shard.key)]
            begin = entry.begin + shard.start * ITEMSIZE[entry.dtype]
            tensor = shard.tensor.detach()
            nbytes = tensor.numel() * ITEMSIZE[entry.dtype]
            early = group in _CLONED_GROUPS or tensor.device.type == "cpu"
            cloned = device is not None and early and nbytes <= _CLONE_BYTES
            sources[number].append(Source(begin, begin + nbytes, tensor.clone() if cloned else tensor, cloned))
    for held in sources.values():
        held.sort(key=lambda s: s.begin)
    return sources


def _pieces(plan: Plan, rank: int, slab_bytes: int) -> list[Piece]:
    """Segments in file order, packed into slabs; files by turns, since one file's writes wait for each other."""
    by_file: list[list[Piece]] = []
    for number, file in enumerate(plan.files):
        pieces: list[Piece] = []
        for segment in file.segments:
            if segment.rank != rank:
                continue
            if not pieces or pieces[-1].size + segment.length > slab_bytes:
                pieces.append(Piece())
            pieces[-1].segments.append((number, segment, pieces[-1].size))
            pieces[-1].size += segment.length
        by_file.append(pieces)
    return [piece for turn in zip_longest(*by_file) for piece in turn if piece is not None]
