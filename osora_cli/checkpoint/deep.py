"""`--deep`: what the values themselves must satisfy, once structure and bytes are known to be right.

Tensors are read in chunks by several threads, so that no tensor has to fit into memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from osora_cli.checkpoint import layout
from osora_cli.checkpoint.digests import Progress
from osora_cli.checkpoint.findings import Check, Finding
from osora_cli.checkpoint.layout import GROUPS
from osora_cli.checkpoint.manifest import Manifest
from osora_cli.checkpoint.parallel import map_threads
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.structure import limited
from osora_cli.errors import OsoraError

CHUNK = 4 << 20  # elements

Shapes = Mapping[str, tuple[int, ...]]
# The run's folder -> the shapes of each network's state dict, by group ("model", "discriminator").
NetworkShapes = Callable[[Path], Mapping[str, Shapes]]


def deep_checks(
    path: Path,
    previous: Path | None,
    networks: NetworkShapes | None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Check]:
    """The checks of a checkpoint whose structure holds.

    Args:
        path: its folder.
        previous: the checkpoint that was saved before it in its run.
        networks: gives the shapes that the run's config asks for; an OsoraError says why there are none.
        threads: readers; None: by the number of cores.
        progress: called with (bytes read, bytes to read).
    """
    try:
        reader = CheckpointReader(path)
        tensors = {group: reader.tensors(group) for group in reader.groups()}
    except OsoraError as error:
        return [Check("values", [Finding("", None, f"cannot be loaded: {error.message}")])]
    shapes = {group: {key: shape for key, (_, shape) in table.items()} for group, table in tensors.items()}
    return [
        Check("values", list(_values(reader, tensors, threads, progress)), "finite, second moments not negative"),
        _masters(reader, tensors, threads),
        _ema(shapes),
        _previous(reader, previous, tensors, threads),
        _networks(path, shapes, networks),
    ]


Tensors = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]


@dataclass(frozen=True)
class _Chunk:
    """The elements [start, start + count) of a tensor."""

    group: str
    key: str
    start: int
    count: int


def _chunks(group: str, table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[_Chunk]:
    for key, (dtype, shape) in table.items():
        if dtype.is_floating_point:
            count = prod(shape)
            for start in range(0, count, CHUNK):
                yield _Chunk(group, key, start, min(CHUNK, count - start))


def file_of(group: str) -> str:
    """What a finding names for a group: its folder or its file."""
    return GROUPS[group].folder or f"{GROUPS[group].stem}.safetensors"


def _values(
    reader: CheckpointReader, tensors: Tensors, threads: int | None, progress: Progress | None
) -> Iterator[Finding]:
    work = [chunk for group, table in tensors.items() for chunk in _chunks(group, table)]
    sizes = {(c.group, c.key): tensors[c.group][c.key][0].itemsize for c in work}
    total = sum(c.count * sizes[c.group, c.key] for c in work)
    done, lock = 0, threading.Lock()

    def look(chunk: _Chunk) -> tuple[str, str, str, int] | None:
        nonlocal done
        values = reader.read_flat(chunk.group, chunk.key, chunk.start, chunk.count)
        with lock:
            done += values.nbytes
            if progress is not None:
                progress(done, total)
        return _fault(chunk, values)

    found = [fault for fault in map_threads(look, work, threads) if fault is not None]
    counts: dict[tuple[str, str, str], int] = {}
    for group, key, what, count in found:
        counts[group, key, what] = counts.get((group, key, what), 0) + count
    for group in tensors:
        yield from limited(
            [
                Finding(file_of(g), key, f"has {n} values that {what}")
                for (g, key, what), n in counts.items()
                if g == group
            ]
        )


def _fault(chunk: _Chunk, values: torch.Tensor) -> tuple[str, str, str, int] | None:
    # Of a sum one pass suffices; only where it is not finite (or overflows) the elements are counted.
    if not bool(torch.isfinite(values.sum(dtype=torch.float64))):
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            return chunk.group, chunk.key, "are not finite", bad
    state = layout.parse_state_key(chunk.key) if GROUPS[chunk.group].optimizer else None
    if state is not None and state[1] == "exp_avg_sq" and bool(values.min() < 0):
        return chunk.group, chunk.key, "are negative, which no second moment is", int((values < 0).sum())
    return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


# Groups of fp32 masters, and of the weights that are those rounded.
_MASTERS = {"master": "model", "disc_master": "discriminator"}


def _masters(reader: CheckpointReader, tensors: Tensors, threads: int | None) -> Check:
    """The weights of each network are its masters rounded to the weights' dtype, bit for bit."""
    name, what = "masters", "each weight is its fp32 master rounded"
    pairs = [(m, w) for m, w in _MASTERS.items() if m in tensors and w in tensors]
    if not pairs:
        return Check(name, detail="there are no masters beside the weights", skipped=True)
    findings = [f for masters, weights in pairs for f in _rounded(reader, tensors, masters, weights, threads)]
    return Check(name, list(limited(findings)), what)


def _rounded(
    reader: CheckpointReader, tensors: Tensors, masters: str, weights: str, threads: int | None
) -> Iterator[Finding]:
    """Where a group of weights is not its masters rounded."""
    held = tensors[weights]
    for key, (_, shape) in tensors[masters].items():
        if key not in held:
            yield Finding(file_of(masters), key, f"has no weight in {weights}/")
        elif held[key][1] != shape:
            yield Finding(file_of(masters), key, f"has shape {list(shape)}, {weights}/ {list(held[key][1])}")
    work = [
        c for c in _chunks(masters, tensors[masters]) if c.key in held and held[c.key][1] == tensors[masters][c.key][1]
    ]

    def differing(chunk: _Chunk) -> tuple[str, int]:
        master = reader.read_flat(masters, chunk.key, chunk.start, chunk.count)
        weight = reader.read_flat(weights, chunk.key, chunk.start, chunk.count)
        return chunk.key, int((_bits(master.to(weight.dtype)) != _bits(weight)).sum())

    counts: dict[str, int] = {}
    for key, count in map_threads(differing, work, threads):
        counts[key] = counts.get(key, 0) + count
    for key, count in counts.items():
        if count:
            yield Finding(file_of(weights), key, f"differs from its master in {count} of {prod(held[key][1])} values")


def _ema(shapes: Mapping[str, Shapes]) -> Check:
    """The average has the weights' shapes."""
    if "ema" not in shapes or "model" not in shapes:
        return Check("ema", detail="there is no EMA", skipped=True)
    findings = []
    for key, shape in shapes["ema"].items():
        wanted = shapes["model"].get(key)
        if wanted is None:
            findings.append(Finding(file_of("ema"), key, "has no weight in model/"))
        elif wanted != shape:
            findings.append(Finding(file_of("ema"), key, f"has shape {list(shape)}, the weight {list(wanted)}"))
    return Check("ema", list(limited(findings)), "the average has the weights' shapes")


def _previous(reader: CheckpointReader, previous: Path | None, tensors: Tensors, threads: int | None) -> Check:
    """The fp32 state is not that of the checkpoint before: a snapshot that was taken once and stored twice."""
    name = "previous"
    if previous is None:
        return Check(name, detail="no checkpoint was saved before this one", skipped=True)
    try:
        before = CheckpointReader(previous)
        if before.counters.actual_update_step == reader.counters.actual_update_step:
            return Check(name, detail=f"{previous.name} is of the same update", skipped=True)
        stale = [g for g in _moving(tensors) if g in before.groups() and _same(reader, before, g, tensors[g], threads)]
    except OsoraError as error:
        return Check(name, detail=f"{previous.name} cannot be read: {error.message}", skipped=True)
    rates = _rates(reader)
    findings = []
    for group in stale:
        if group == "disc_optimizer" and _never_stepped(reader, group, tensors[group]):
            continue
        still = group != "optimizer" and rates is not None and not any(rates)
        what = f"is bit for bit that of {previous.name}" + (", with a learning rate of 0" if still else "")
        findings.append(Finding(file_of(group), None, what, "note" if still else "damage"))
    return Check(name, findings, f"moved on since {previous.name}")


def _never_stepped(reader: CheckpointReader, group: str, table: Mapping[str, object]) -> bool:
    return all(not bool(reader.read_flat(group, key, 0, 1).any()) for key in table if key.endswith(".step"))


def _moving(tensors: Tensors) -> list[str]:
    """Groups that every update changes: in bf16 weights may well stay where they are."""
    # (A discriminator's optimizer does not before its start; `_previous` looks.)
    moving = [g for g in ("master", "optimizer", "disc_optimizer") if g in tensors]
    if "master" not in tensors and any(dtype == torch.float32 for dtype, _ in tensors.get("model", {}).values()):
        moving.insert(0, "model")
    return moving


def _same(
    reader: CheckpointReader,
    before: CheckpointReader,
    group: str,
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    threads: int | None,
) -> bool:
    """Whether all floating tensors of a group are the same in both (the optimizer's step left out)."""
    table = {key: kind for key, kind in table.items() if not key.endswith(".step")}
    if not table or before.tensors(group).keys() < table.keys():
        return False
    if reader.manifest is not None and before.manifest is not None and group not in ("optimizer", "disc_optimizer"):
        return _same_files(reader.manifest, before.manifest, group)

    def equal(chunk: _Chunk) -> bool:
        ours = reader.read_flat(group, chunk.key, chunk.start, chunk.count)
        theirs = before.read_flat(group, chunk.key, chunk.start, chunk.count)
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((_bits(ours) == _bits(theirs)).all())

    chunks = list(_chunks(group, table))
    step = 4 * max(1, threads or 4)
    # One that differs is enough, and nearly always among the first.
    return bool(chunks) and all(
        all(map_threads(equal, chunks[n : n + step], threads)) for n in range(0, len(chunks), step)
    )


def _same_files(a: Manifest, b: Manifest, group: str) -> bool:
    """By the digests of the manifests, which have been compared with the bytes."""
    stem = GROUPS[group].folder + "/" if GROUPS[group].folder else GROUPS[group].shard(1)
    files = {name for name in a.files if name.startswith(stem) and name.endswith(".safetensors")}
    return bool(files) and all(
        name in b.files
        and {(r.offset, r.digest) for r in a.files[name].ranges} == {(r.offset, r.digest) for r in b.files[name].ranges}
        for name in files
    )


def _rates(reader: CheckpointReader) -> list[float] | None:
    try:
        return [float(group["lr"]) for group in reader.param_groups("optimizer")]
    except (OsoraError, KeyError, TypeError, ValueError):
        return None


def _networks(path: Path, shapes: Mapping[str, Shapes], networks: NetworkShapes | None) -> Check:
    """The weights are those of the networks that the run's config names."""
    name = "network"
    if networks is None:
        return Check(name, detail="no config was looked for", skipped=True)
    try:
        wanted = networks(path.resolve().parent)
    except OsoraError as error:
        return Check(name, detail=f"not compared with the run's config: {error.message}", skipped=True)
    findings: list[Finding] = []
    for group, table in wanted.items():
        findings += limited(list(_misfits(group, shapes.get(group, {}), table)))
    compared: Sequence[str] = [group for group in wanted if group in shapes]
    return Check(name, findings, f"fits the config: {', '.join(compared) or 'nothing'}")


def _misfits(group: str, held: Shapes, wanted: Shapes) -> Iterator[Finding]:
    for key, shape in wanted.items():
        if key not in held:
            yield Finding(file_of(group), key, "is missing: the config's network has it", "missing")
        elif held[key] != shape:
            yield Finding(file_of(group), key, f"has shape {list(held[key])}, the config's network {list(shape)}")
    for key in held:
        if key not in wanted:
            yield Finding(file_of(group), key, "is not in the config's network")
