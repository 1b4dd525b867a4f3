"""The plan: every byte to one rank, no page to two, the same for all."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import Split, bounds

from osora_cli.checkpoint.headers import ITEMSIZE
from osora_cli.checkpoint.plan import MIB, PAGE, Part, Plan, PlanError, TensorSpec, make_plan

RANKS = (1, 2, 3, 4, 8)
SPLITS: tuple[Split, ...] = ("flat", "rows", "replicated", "first", "mesh")


def spec(key: str, dtype: str, shape: tuple[int, ...], world_size: int, how: Split) -> TensorSpec:
    parts = tuple(Part(rank, *bounds(shape, rank, world_size, how)) for rank in range(world_size))
    return TensorSpec(key, dtype, shape, parts)


def check_plan(plan: Plan) -> None:
    """Ranges tile each file once, none is too long, no two ranks share a page, and every byte is to be had."""
    for file in plan.files:
        position = file.header.data_start
        pages: dict[int, int] = dict.fromkeys(range(-(-position // PAGE)), 0)
        for segment in file.segments:
            assert segment.offset == position
            assert 0 < segment.length <= plan.range_limit
            position += segment.length
            for page in range(segment.offset // PAGE, (position - 1) // PAGE + 1):
                assert pages.setdefault(page, segment.rank) == segment.rank, f"page {page} has two ranks"
        assert position == file.size
        for transfer in file.transfers:
            assert transfer.source != transfer.target
            owners = {s.rank for s in file.segments if s.offset <= transfer.offset < s.offset + s.length}
            assert owners == {transfer.target}
            assert transfer.length < PAGE


def covered(spans: list[tuple[int, int]], begin: int, end: int) -> bool:
    for a, b in sorted(spans):
        if a <= begin < b:
            begin = b
    return begin >= end


def bytes_at_hand(plan: Plan, specs: dict[str, list[TensorSpec]]) -> None:
    """What a rank writes it holds itself or is sent."""
    for file in plan.files:
        table = {s.key: s for s in specs[file.group]}
        held: dict[int, list[tuple[int, int]]] = {}
        for entry in file.header.entries:
            size = ITEMSIZE[entry.dtype]
            for part in table[entry.key.removeprefix("module.")].parts:
                begin = entry.begin + part.start * size
                held.setdefault(part.rank, []).append((begin, begin + part.count * size))
        for transfer in file.transfers:
            span = (transfer.offset, transfer.offset + transfer.length)
            assert covered(held.get(transfer.source, []), *span)
            held.setdefault(transfer.target, []).append(span)
        for segment in file.segments:
            assert covered(held.get(segment.rank, []), segment.offset, segment.offset + segment.length)


shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
dtypes = st.sampled_from(["F32", "BF16", "U8", "I64"])


@settings(max_examples=150, deadline=None)
@given(
    tensors=st.lists(st.tuples(dtypes, shapes, st.sampled_from(SPLITS)), min_size=1, max_size=12),
    world_size=st.sampled_from(RANKS),
    limit=st.sampled_from([PAGE, 4 * PAGE, 64 * MIB]),
    shard_limit=st.sampled_from([20_000, 1 << 32]),
)
def test_ranges_tile_each_file_once_and_no_page_is_shared(
    tensors: list[tuple[str, tuple[int, ...], Split]], world_size: int, limit: int, shard_limit: int
) -> None:
    specs = {"model": [spec(f"t{n}", d, s, world_size, how) for n, (d, s, how) in enumerate(tensors)]}
    plan = make_plan(specs, world_size, range_limit=limit, shard_limit=shard_limit)
    check_plan(plan)
    bytes_at_hand(plan, specs)
    assert make_plan(specs, world_size, range_limit=limit, shard_limit=shard_limit).digest == plan.digest
    alone = {"model": [spec(f"t{n}", d, s, 1, "flat") for n, (d, s, _) in enumerate(tensors)]}
    one = make_plan(alone, 1, range_limit=limit, shard_limit=shard_limit)
    assert [(f.path, f.raw_header) for f in one.files] == [(f.path, f.raw_header) for f in plan.files]
    assert one.indexes == plan.indexes


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("how", SPLITS)
def test_large_tensors_are_shared_out(world_size: int, how: Split) -> None:
    """1.2 GB in three tensors: each rank writes its part, within a page a tensor."""
    specs = {
        "master": [
            spec("a", "F32", (10_007, 9_999), world_size, how),
            spec("b", "F32", (3,), world_size, how),
            spec("c", "F32", (50_021, 4_001), world_size, how),
        ]
    }
    plan = make_plan(specs, world_size)
    check_plan(plan)
    bytes_at_hand(plan, specs)
    written = [sum(s.length for f in plan.files for s in f.segments if s.rank == rank) for rank in range(world_size)]
    total = sum(prod(s.shape) * 4 for s in specs["master"])
    assert sum(written) == total
    if how == "replicated":
        assert max(written) - min(written) <= 3 * PAGE
    elif how in ("flat", "rows"):
        assert max(written) <= total / world_size + 3 * 50_021 * 4


def test_shards_close_before_the_next_tensor_would_pass_the_limit() -> None:
    sizes = [300, 300, 500, 100, 1200, 10]
    specs = [spec(f"t{n}", "U8", (size,), 1, "flat") for n, size in enumerate(sizes)]
    plan = make_plan({"model": specs}, 1, shard_limit=1000)
    assert [[e.key for e in f.header.entries] for f in plan.files] == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t5"]]
    assert [f.path for f in plan.files] == [f"model/model-{n:05d}.safetensors" for n in (1, 2, 3, 4)]
    index = json.loads(plan.indexes["model/model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(sizes) / MIB
    assert index["weight_map"]["t3"] == "model-00002.safetensors"
    assert plan.indexes["model/model.safetensors.index.json"].endswith(b"\n")


def test_a_parameters_state_stays_in_one_shard() -> None:
    specs = [
        spec(f"state.{i}.{name}", "F32", () if name == "step" else (100,), 1, "flat")
        for i in range(3)
        for name in ("step", "exp_avg", "exp_avg_sq")
    ]
    plan = make_plan({"optimizer": specs}, 1, shard_limit=1500)
    assert len(plan.files) == 3
    index = json.loads(plan.indexes["optimizer/optimizer.safetensors.index.json"])
    assert index["metadata"]["param_groups"] == "pytorch_optim_group.bin"
    assert index["weight_map"] == {str(i): f"optimizer-{i + 1:05d}.safetensors" for i in range(3)}


def test_masters_and_ema_are_one_file_each() -> None:
    specs = [spec("w", "F32", (4,), 1, "flat")]
    plan = make_plan({"master": specs, "ema": specs}, 1, shard_limit=8)
    assert [f.path for f in plan.files] == ["ema.safetensors", "master.safetensors"]
    assert [e.key for f in plan.files for e in f.header.entries] == ["w", "module.w"]


def test_every_tensor_lies_at_a_multiple_of_its_item_size() -> None:
    """Readers view the mapped file as the dtype, which needs that."""
    kinds = [("U8", (3,)), ("BF16", (5,)), ("F32", (7,)), ("I64", ()), ("BF16", (1,)), ("F32", (1,))]
    specs = [spec(f"t{n}", d, s, 1, "flat") for n, (d, s) in enumerate(kinds)]
    (file,) = make_plan({"model": specs}, 1).files
    assert all(e.begin % ITEMSIZE[e.dtype] == 0 for e in file.header.entries)
    assert [e.key for e in file.header.entries] == ["t3", "t2", "t5", "t1", "t4", "t0"]


def test_the_hash_tells_plans_apart() -> None:
    def digest(world_size: int, how: Split, **options: int) -> str:
        return make_plan({"model": [spec("w", "F32", (9999,), world_size, how)]}, world_size, **options).digest

    digests = [digest(1, "flat"), digest(2, "flat"), digest(2, "replicated"), digest(2, "flat", range_limit=PAGE)]
    assert len(set(digests)) == 4


def test_faults_name_the_tensor() -> None:
    with pytest.raises(PlanError, match=r"no rank holds the elements 3 to 5 of `w`"):
        make_plan({"model": [TensorSpec("w", "F32", (6,), (Part(0, 0, 3),))]}, 1)
    with pytest.raises(PlanError, match="two tensors of `model` are named `w`"):
        make_plan({"model": [spec("w", "F32", (2,), 1, "flat")] * 2}, 1)
    with pytest.raises(PlanError, match="one behind its end"):
        make_plan({"model": [TensorSpec("w", "F32", (2,), (Part(0, 0, 3),))]}, 1)
    with pytest.raises(PlanError, match="no optimizer state"):
        make_plan({"optimizer": [spec("w", "F32", (2,), 1, "flat")]}, 1)


def test_parts_that_overlap_are_each_written_once() -> None:
    parts = (Part(0, 0, 3000), Part(1, 2000, 3000), Part(2, 5000, 1000))
    specs = {"model": [TensorSpec("w", "F32", (6000,), parts)]}
    plan = make_plan(specs, 3)
    check_plan(plan)
    bytes_at_hand(plan, specs)
    starts = [s.offset for s in plan.files[0].segments]
    assert all(a < b for a, b in pairwise(starts))
