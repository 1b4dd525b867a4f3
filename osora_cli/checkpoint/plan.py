"""Which byte of a checkpoint's tensor files is whose: a pure function of what the ranks hold. Knows no torch.

A shard that starts at element a of a tensor whose bytes begin at file offset o is the byte range
[o + a*itemsize, ...), so ranks can write ordinary safetensors files together. Two rules shape the ranges: no two
ranks write one 4 KiB page (NFS clients own whole pages), and a range is at most `range_limit` long (each has a
digest of its own, so nothing has to be combined and verification runs in parallel).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import xxhash

from osora_cli.checkpoint.headers import ITEMSIZE, Entry, Header, build_header
from osora_cli.checkpoint.layout import GROUPS, PARAM_GROUPS, GroupLayout, parse_state_key

PAGE = 4096
MIB = 1 << 20
RANGE_LIMIT = 64 * MIB
SHARD_LIMIT = 4096 * MIB


class PlanError(ValueError):
    """The ranks' tensors cannot be written as one checkpoint; the message names the tensor."""


@dataclass(frozen=True)
class Part:
    """The elements [start, start + count) of a tensor are on this rank."""

    rank: int
    start: int
    count: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor and where its elements are. `dtype` is safetensors' name, `key` has no wrapper's prefix."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Replica:
    """The elements [start, start + count) of a tensor, held by more than one rank. `key` as in `TensorSpec`."""

    group: str
    key: str
    start: int
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Bytes of a file that one rank writes and digests."""

    rank: int
    offset: int
    length: int


@dataclass(frozen=True)
class Transfer:
    """Bytes that `source` holds in a page that `target` writes."""

    source: int
    target: int
    offset: int
    length: int


@dataclass(frozen=True)
class FilePlan:
    """One tensor file. Segments and the header's own bytes tile it exactly."""

    path: str
    group: str
    raw_header: bytes
    header: Header
    segments: tuple[Segment, ...]
    transfers: tuple[Transfer, ...]

    @property
    def size(self) -> int:
        return self.header.end


@dataclass(frozen=True)
class Plan:
    """All tensor files, the index of each folder of shards (path -> JSON), and what several ranks hold alike."""

    world_size: int
    range_limit: int
    files: tuple[FilePlan, ...]
    indexes: dict[str, bytes] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()

    @cached_property
    def digest(self) -> str:
        """xxh3_128 of everything that the ranks must agree on."""
        content = [
            self.world_size,
            self.range_limit,
            sorted((path, xxhash.xxh3_128_hexdigest(raw)) for path, raw in self.indexes.items()),
            [
                (
                    file.path,
                    file.size,
                    xxhash.xxh3_128_hexdigest(file.raw_header),
                    [(s.rank, s.offset, s.length) for s in file.segments],
                    [(t.source, t.target, t.offset, t.length) for t in file.transfers],
                )
                for file in self.files
            ],
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, separators=(",", ":")).encode())

    @cached_property
    def locations(self) -> dict[tuple[str, str], tuple[int, Entry]]:
        """(group, key as the engine names it) -> (number of the file, entry)."""
        out = {}
        for number, file in enumerate(self.files):
            prefix = len(GROUPS[file.group].prefix)
            for entry in file.header.entries:
                out[file.group, entry.key[prefix:]] = (number, entry)
        return out

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def make_plan(
    groups: Mapping[str, Sequence[TensorSpec]],
    world_size: int,
    *,
    range_limit: int = RANGE_LIMIT,
    shard_limit: int = SHARD_LIMIT,
) -> Plan:
    """Lay the groups' tensors out in files and give every byte to one rank.

    Args:
        groups: tensors of each group in state-dict order; the same on all ranks.
        world_size: number of ranks.
        range_limit: longest range in bytes, a multiple of the page size.
        shard_limit: a shard is closed when the next tensor (for an optimizer: the next parameter's state) would
            take it past this many bytes of tensors.

    Raises:
        PlanError: a key twice, or elements that no rank holds.
    """
    if range_limit < PAGE or range_limit % PAGE:
        raise PlanError(f"the range limit `{range_limit}` is no multiple of {PAGE} bytes")
    files: list[FilePlan] = []
    indexes: dict[str, bytes] = {}
    for name, layout in GROUPS.items():
        if name not in groups:
            continue
        _refuse_twins(name, groups[name])
        shards = _shards(layout, groups[name], shard_limit)
        for number, specs in enumerate(shards, start=1):
            files.append(_file_plan(layout.shard(number), name, specs, world_size, range_limit))
        if layout.index is not None:
            indexes[layout.index] = _index(layout, shards)
    replicas = tuple(r for name in GROUPS if name in groups for spec in groups[name] for r in _replicas(name, spec))
    return Plan(world_size, range_limit, tuple(files), indexes, replicas)


def _replicas(group: str, spec: TensorSpec) -> Iterator[Replica]:
    held: dict[tuple[int, int], set[int]] = {}
    for part in spec.parts:
        held.setdefault((part.start, part.count), set()).add(part.rank)
    for (start, count), ranks in held.items():
        if count and len(ranks) > 1:
            yield Replica(group, spec.key, start, count, tuple(sorted(ranks)))


def _refuse_twins(group: str, specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.key in seen:
            raise PlanError(f"two tensors of `{group}` are named `{spec.key}`")
        seen.add(spec.key)


def _nbytes(spec: TensorSpec) -> int:
    return ITEMSIZE[spec.dtype] * prod(spec.shape)


def _units(layout: GroupLayout, specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """What must stay together in one shard: a tensor, or all states of one parameter."""
    if not layout.optimizer:
        return [[spec] for spec in specs]
    units: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        state = parse_state_key(spec.key)
        if state is None:
            raise PlanError(f"`{spec.key}` is no optimizer state of the form `state.0.exp_avg`")
        units.setdefault(state[0], []).append(spec)
    return list(units.values())


def _shards(layout: GroupLayout, specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    if not layout.folder:
        return [_aligned(specs)]
    shards: list[list[TensorSpec]] = []
    size = 0
    for unit in _units(layout, specs):
        unit_size = sum(_nbytes(spec) for spec in unit)
        if not shards or size + unit_size > limit:
            shards.append([])
            size = 0
        shards[-1] += unit
        size += unit_size
    return [_aligned(shard) for shard in shards]


def _aligned(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Wide dtypes first, else in order: readers map the file and need every tensor at a multiple of its item size."""
    return sorted(specs, key=lambda spec: -ITEMSIZE[spec.dtype])


def _index(layout: GroupLayout, shards: list[list[TensorSpec]]) -> bytes:
    """The index as ColossalAI's loader reads it: total size in MiB, the file of each key (or parameter number)."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = layout.shard(number).rpartition("/")[2]
        for spec in shard:
            state = parse_state_key(spec.key) if layout.optimizer else None
            weight_map[str(state[0]) if state else layout.prefix + spec.key] = file
    metadata: dict[str, object] = {"total_size": sum(_nbytes(s) for shard in shards for s in shard) / MIB}
    if layout.optimizer:
        metadata["param_groups"] = PARAM_GROUPS
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n").encode()


def _file_plan(path: str, group: str, specs: list[TensorSpec], world_size: int, range_limit: int) -> FilePlan:
    prefix = GROUPS[group].prefix
    raw, header = build_header([(prefix + spec.key, spec.dtype, spec.shape) for spec in specs])
    entries = {entry.key: entry for entry in header.entries}
    claims: list[tuple[int, int, tuple[int, ...]]] = []
    for spec in specs:
        entry = entries[prefix + spec.key]
        size = ITEMSIZE[spec.dtype]
        for start, end, ranks in _claims(spec, world_size):
            claims.append((entry.begin + start * size, entry.begin + end * size, ranks))
    segments, transfers = _by_pages(_runs(claims), header.data_start)
    return FilePlan(path, group, raw, header, tuple(_cut(segments, range_limit)), tuple(transfers))


def _claims(spec: TensorSpec, world_size: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first element, end, ranks that hold them), tiling the tensor."""
    held: dict[tuple[int, int], list[int]] = {}
    for part in spec.parts:
        if not 0 <= part.rank < world_size:
            raise PlanError(f"rank {part.rank} of `{spec.key}` is not among {world_size} ranks")
        if part.count:
            held.setdefault((part.start, part.start + part.count), []).append(part.rank)
    spans = sorted(held)
    count = prod(spec.shape)
    edges = sorted({0, count, *(edge for span in spans for edge in span)})
    if edges[-1] > count:
        raise PlanError(f"`{spec.key}` has {count} elements, a rank holds one behind its end")
    if [(a, b) for a, b in pairwise(edges)] == spans:
        return [(a, b, tuple(sorted(set(held[a, b])))) for a, b in spans]
    out = []
    for a, b in pairwise(edges):  # parts that overlap in part: seldom, so the plain way
        ranks = sorted({r for (start, end), ranks in held.items() if start <= a and b <= end for r in ranks})
        if not ranks:
            raise PlanError(f"no rank holds the elements {a} to {b - 1} of `{spec.key}`")
        out.append((a, b, tuple(ranks)))
    return out


def _runs(claims: list[tuple[int, int, tuple[int, ...]]]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(begin, end, rank that gives the bytes, all that hold them). Their holders share replicas out by pages."""
    merged: list[tuple[int, int, tuple[int, ...]]] = []
    for begin, end, ranks in claims:
        if merged and merged[-1][1] == begin and merged[-1][2] == ranks:
            merged[-1] = (merged[-1][0], end, ranks)
        else:
            merged.append((begin, end, ranks))
    for begin, end, ranks in merged:
        cuts = [begin + (end - begin) * i // len(ranks) for i in range(len(ranks) + 1)]
        cuts[1:-1] = [max(begin, cut - cut % PAGE) for cut in cuts[1:-1]]
        for rank, (a, b) in zip(ranks, pairwise(cuts), strict=True):
            if a < b:
                yield a, b, rank, ranks


def _by_pages(
    runs: Iterator[tuple[int, int, int, tuple[int, ...]]], data_start: int
) -> tuple[list[Segment], list[Transfer]]:
    """Give each page to the rank that holds its first byte (the header's pages to rank 0)."""
    segments: list[Segment] = []
    transfers: list[Transfer] = []

    def own(rank: int, begin: int, end: int) -> None:
        last = segments[-1] if segments else None
        if last and last.rank == rank and last.offset + last.length == begin:
            segments[-1] = Segment(rank, last.offset, last.length + end - begin)
        else:
            segments.append(Segment(rank, begin, end - begin))

    owner = 0
    for begin, end, holder, ranks in runs:
        if begin % PAGE:  # inside a page that has its owner already
            cut = min(end, begin + PAGE - begin % PAGE)
            own(owner, begin, cut)
            if owner not in ranks:
                transfers.append(Transfer(holder, owner, begin, cut - begin))
            begin = cut
        if begin < end:
            owner = holder
            own(owner, begin, end)
    return segments, transfers


def _cut(segments: list[Segment], limit: int) -> Iterator[Segment]:
    """Cut at multiples of the limit, so that every cut lies between pages."""
    for segment in segments:
        begin, end = segment.offset, segment.offset + segment.length
        while begin < end:
            cut = min(end, begin - begin % limit + limit)
            yield Segment(segment.rank, begin, cut - begin)
            begin = cut
