"""Several ranks write one checkpoint: the files are those of one rank, byte for byte."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from support.checkpoints import contents, save, tensors
from support.ranks import Split, ThreadComm, run_ranks, shards_of

from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.events import SaveError, SaveEvent
from osora_cli.checkpoint.manifest import parse_manifest
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.replicas import word_sum
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.tensors import TensorShard

UPDATE = 4


def rank_contents(comm: ThreadComm, how: Split) -> CheckpointContents:
    groups = {name: shards_of(table, comm.rank, comm.world_size, how) for name, table in tensors(UPDATE).items()}
    state = contents(UPDATE, groups=groups)
    state.rng = {"torch": [comm.rank]}
    return state


def save_with_ranks(run: Path, world_size: int, how: Split, *, async_io: bool = True, buffer: int = 1 << 30) -> Path:
    def body(comm: ThreadComm) -> list[str]:
        events: list[SaveEvent] = []
        store = CheckpointStore(run, async_io=async_io, comm=comm, buffer_bytes=buffer, on_event=events.append)
        try:
            store.save(rank_contents(comm, how))
            store.finish()
        finally:
            store.close()
        return [event.kind for event in events]

    assert run_ranks(world_size, body) == [["submitted", "committed"]] * world_size
    return run / f"epoch0-global_step{UPDATE}"


@lru_cache
def written_alone(run: Path, async_io: bool) -> dict[str, bytes]:
    (folder,) = save(run, UPDATE, async_io=async_io)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("how", ["flat", "rows", "replicated", "first", "mesh"])
def test_files_of_many_ranks_are_those_of_one(tmp_path: Path, alone: Path, world_size: int, how: Split) -> None:
    folder = save_with_ranks(tmp_path, world_size, how)
    expected = written_alone(alone, True)
    for name, data in expected.items():
        if name != "manifest.json" and not name.startswith("rng/"):
            assert (folder / name).read_bytes() == data, name
    assert [p.name for p in sorted((folder / "rng").iterdir())] == [f"rank-{r:05d}.json" for r in range(world_size)]
    assert verify(folder).verdict == "ok"
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    assert manifest.world_size == world_size


@pytest.mark.parametrize("how", ["flat", "rows"])
def test_small_buffers_and_the_synchronous_mode(tmp_path: Path, alone: Path, how: Split) -> None:
    folder = save_with_ranks(tmp_path / "pieces", 3, how, buffer=8192)
    for name, data in written_alone(alone, True).items():
        if name != "manifest.json" and not name.startswith("rng/"):
            assert (folder / name).read_bytes() == data, name
    folder = save_with_ranks(tmp_path / "sync", 3, how, async_io=False)
    assert verify(folder).verdict == "ok"
    ema = torch.load(folder / "ema.pt", weights_only=True)
    assert all(torch.equal(ema[key], value) for key, value in tensors(UPDATE)["ema"].items())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("how", ["flat", "rows"])
def test_any_number_of_ranks_reads_its_part(tmp_path: Path, world_size: int, how: Split) -> None:
    folder = save_with_ranks(tmp_path, 3, "flat")
    reader = CheckpointReader(folder)
    for group, table in tensors(UPDATE).items():
        for rank in range(world_size):
            wanted = shards_of(table, rank, world_size, how)
            got = [TensorShard(s.key, s.shape, s.start, torch.full_like(s.tensor, 7)) for s in wanted]
            reader.read_into(group, got)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, got, strict=True)), group
    assert reader.rng(2) == {"torch": [2]}
    assert reader.rng(3) is None


def test_each_rank_writes_its_half(tmp_path: Path) -> None:
    """Counted on large tensors, where the pages that straddle do not matter."""
    table = {"w": torch.randn(1_000_003), "v": torch.randn(999, 1001)}
    written: dict[int, int] = {}

    def body(comm: ThreadComm) -> None:
        store = CheckpointStore(tmp_path, async_io=True, comm=comm)
        state = CheckpointContents(contents(1).counters, {"master": shards_of(table, comm.rank, 2, "flat")})
        store.save(state)
        store.finish()
        store.close()
        assert store._plan is not None
        plan = store._plan[1]
        written[comm.rank] = sum(s.length for f in plan.files for s in f.segments if s.rank == comm.rank)

    assert run_ranks(2, body) == [None, None]
    total = sum(t.nbytes for t in table.values())
    assert sum(written.values()) == total
    assert all(abs(part / total - 0.5) < 0.01 for part in written.values())


@pytest.mark.parametrize("async_io", [True, False])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_reaches_all(tmp_path: Path, broken: int, async_io: bool) -> None:
    """Nothing is committed, and each rank knows which one failed."""

    def body(comm: ThreadComm) -> None:
        def fail(name: str) -> None:
            if name == "fdatasync" and comm.rank == broken:
                raise OSError(5, "Input/output error")

        store = CheckpointStore(tmp_path, async_io=async_io, comm=comm, on_phase=fail)
        try:
            store.save(rank_contents(comm, "flat"))
            store.finish()
        finally:
            store.close()

    results = run_ranks(3, body)
    assert all(isinstance(result, SaveError) for result in results)
    told = [str(result) for result in results]
    assert all("Input/output error" in text for text in told)
    assert all(f"rank {broken}" in text for rank, text in enumerate(told) if rank != broken)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_stop_the_save(tmp_path: Path) -> None:
    def body(comm: ThreadComm) -> None:
        table = {"w": torch.zeros(6 + comm.rank)}
        store = CheckpointStore(tmp_path, async_io=True, comm=comm)
        try:
            store.save(CheckpointContents(contents(1).counters, {"model": shards_of(table, comm.rank, 2, "flat")}))
        finally:
            store.close()

    results = run_ranks(2, body)
    assert all(isinstance(r, SaveError) and "`w` of `model` is F32[7] on rank 1" in str(r) for r in results)
    assert list(tmp_path.iterdir()) == []


def test_state_that_one_rank_cannot_hand_over_stops_all(tmp_path: Path) -> None:
    def body(comm: ThreadComm) -> None:
        state = rank_contents(comm, "flat")
        state.rng = {"bad": {1, 2}} if comm.rank == 1 else {}
        store = CheckpointStore(tmp_path, async_io=True, comm=comm)
        try:
            store.save(state)
        finally:
            store.close()

    results = run_ranks(2, body)
    assert all(isinstance(r, SaveError) and "no JSON" in str(r) for r in results)


def test_no_space_on_rank_0_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osora_cli.checkpoint.fsio.free_bytes", lambda folder: 1000)

    def body(comm: ThreadComm) -> None:
        store = CheckpointStore(tmp_path, async_io=True, comm=comm)
        try:
            store.save(rank_contents(comm, "flat"))
        finally:
            store.close()

    results = run_ranks(2, body)
    assert all("no space for a checkpoint" in str(result) for result in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("async_io", [True, False])
@pytest.mark.parametrize(
    ("group", "key"), [("master", "logit"), ("optimizer", "state.2.exp_avg"), ("model", "mid.weight")]
)
def test_replicas_that_differ_are_not_saved(tmp_path: Path, async_io: bool, group: str, key: str) -> None:
    """One value of one tensor on one rank of three, not in the part that this rank would write or in that."""

    def body(comm: ThreadComm) -> str:
        state = rank_contents(comm, "replicated")
        if comm.rank == 1:
            (shard,) = (s for s in state.sharded[group] if s.key == key)
            shard.tensor.view(-1)[0] += 0.5
        store = CheckpointStore(tmp_path, async_io=async_io, comm=comm)
        try:
            store.save(state)
            store.finish()
        except SaveError as error:
            return str(error)
        finally:
            store.close()
        return "saved"

    told = run_ranks(3, body)
    for text in map(str, told):
        assert f"`{key}` of `{group}`: ranks 0, 2 and rank 1 hold different values" in text
    assert not list(tmp_path.glob("epoch*"))
    assert not list(tmp_path.glob(".*")), "nothing half is left"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 1001])
def test_word_sums_see_every_value(size: int) -> None:
    values = torch.arange(1.0, size + 2)
    sums = {int(word_sum(values[1:]))}
    for dtype in (torch.bfloat16, torch.float32):
        base = values.to(dtype)
        assert int(word_sum(base[1:])) == int(word_sum(base[1:].clone())), "where it lies does not matter"
        for place in {0, size // 2, size - 1}:
            changed = base[1:].clone()
            changed[place] = -changed[place]
            sums.add(int(word_sum(changed)))
            assert int(word_sum(changed)) != int(word_sum(base[1:]))
    assert len(sums) > 1
