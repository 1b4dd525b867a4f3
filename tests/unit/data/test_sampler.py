from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.counting import count_calls
from support.golden import load_json

from osora_cli.data.plan import Batch, plain_order
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.errors import CheckpointError, UsageError

GOLDEN = load_json("data_sampler")
RUNS = GOLDEN["runs"]


def _run_id(run: dict[str, Any]) -> str:
    parts = [f"{key}{run[key]}" for key in ("seed", "drop_last", "shuffle", "num_replicas")]
    return "-".join([run["bucket"], *parts])


def _columns() -> tuple[NDArray[Any], ...]:
    names, rows = GOLDEN["dataset"]["columns"], GOLDEN["dataset"]["rows"]
    column = {name: [row[names.index(name)] for row in rows] for name in names}
    fps = np.array([math.nan if value is None else value for value in column["fps"]], dtype=np.float64)
    return *(np.array(column[name], dtype=np.int64) for name in ("num_frames", "height", "width")), fps


def _sampler(run: dict[str, Any], rank: int = 0, **changes: Any) -> BucketSampler:
    config = {name: {int(t): tuple(e) for t, e in lengths.items()} for name, lengths in run["bucket_config"].items()}
    keys = ("fps_max", "num_replicas", "seed", "shuffle", "drop_last")
    options = {"bucket_config": config, "spatial_compression": 16, "rank": rank, **{key: run[key] for key in keys}}
    return BucketSampler(*_columns(), **{**options, **changes})


def _items(batch: Batch) -> list[str]:
    return [f"{row}-{batch.frames}-{batch.height}-{batch.width}" for row in batch.rows]


def _plain(drop_last: bool = True, **changes: Any) -> BucketSampler:
    """Of the first golden run's clips, with one rank unless told otherwise."""
    run = next(run for run in RUNS if run["drop_last"] == drop_last and run["shuffle"] and run["num_replicas"] == 1)
    return _sampler(run, **changes)


# -- golden ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS, ids=_run_id)
def test_batches_are_as_golden_on_every_rank(run: dict[str, Any], note_repaired: Callable[[str, str], None]) -> None:
    for want in run["per_rank"]:
        sampler = _sampler(run, want["rank"])
        for epoch, batches in want["epochs"].items():
            plan = sampler.epoch_batches(int(epoch))
            assert len(plan) == len(batches)
            for got, wanted in zip(plan, batches, strict=True):
                if wanted:
                    assert _items(got) == wanted
                else:
                    note_repaired(f"data_sampler {_run_id(run)}", "the last rank's last batch is empty")
                    first = _sampler(run, 0).epoch_batches(int(epoch))[0]
                    assert _items(got) == _items(first)


@pytest.mark.parametrize("run", RUNS, ids=_run_id)
def test_resumes_are_as_golden(run: dict[str, Any]) -> None:
    """A state of the reference goes on where the reference does; at an epoch's end with the next epoch."""
    for want in run["per_rank"]:
        sampler = _sampler(run, want["rank"])
        state, after = want["state_dict_5"], want["after_load_state_dict"]
        ours = sampler.state(state["epoch"], state["last_micro_batch_access_index"] // run["num_replicas"])
        assert {key: ours[key] for key in state} == state
        epoch, start = sampler.resume(state)
        if after["n"] == 0:
            assert (epoch, start) == (state["epoch"] + 1, 0)
            continue
        assert (epoch, start) == (state["epoch"], state["last_micro_batch_access_index"])
        rest = list(sampler.epoch_batches(epoch, start))
        assert len(rest) == after["n"]
        assert rest == list(sampler.epoch_batches(epoch))[-after["n"] :]
        step = want["resume"]["step"]
        plan = sampler.epoch_batches(want["resume"]["epoch"])
        assert list(plan[step:]) == list(plan)[step:]


def test_another_number_of_ranks_is_as_golden_from_where_the_reference_begins() -> None:
    """The reference steps back to a multiple of the ranks and so repeats clips; from there the batches are its own."""
    item = GOLDEN["resume_2_to_3_replicas"]
    run = next(run for run in RUNS if run["seed"] == item["state"]["seed"])
    floor = item["state"]["last_micro_batch_access_index"] // 3 * 3
    for rank, batches in item["batches"].items():
        sampler = _sampler(run, int(rank), num_replicas=3)
        assert [_items(batch) for batch in sampler.epoch_batches(item["state"]["epoch"], floor)] == batches


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_rank_has_as_many_batches_and_no_position_comes_twice(ranks: int, drop_last: bool) -> None:
    for epoch in (0, 1):
        one = list(_plain(drop_last).epoch_batches(epoch))
        plans = [list(_plain(drop_last, num_replicas=ranks, rank=rank).epoch_batches(epoch)) for rank in range(ranks)]
        assert len({len(plan) for plan in plans}) == 1
        assert len(plans[0]) == (len(one) // ranks if drop_last else -(-len(one) // ranks))
        merged = [batch for step in zip(*plans, strict=True) for batch in step]
        positions = [position for batch in merged for position in batch.positions]
        assert positions == list(range(len(positions)))
        # The order over all ranks does not depend on how many there are.
        common = min(len(one), len(merged))
        assert merged[:common] == one[:common]
        assert [batch.rows for batch in merged[common:]] == [batch.rows for batch in one[: len(merged) - common]]


def test_more_ranks_than_batches_repeat_them_or_get_none() -> None:
    shape = {"bucket_config": {"512px_ar1:1": {65: (1.0, 20)}}, "num_replicas": 7}
    count = _plain(False, **shape).order(0).num_micro_batches
    assert 0 < count < 7
    plans = [_plain(False, **shape, rank=rank).epoch_batches(0) for rank in range(7)]
    assert [len(plan) for plan in plans] == [1] * 7
    assert [plan[0].rows for plan in plans] == [plans[i % count][0].rows for i in range(7)]
    assert len({plan[0].positions for plan in plans}) == 7
    assert [len(_plain(True, **shape, rank=rank).epoch_batches(0)) for rank in range(7)] == [0] * 7


def test_a_table_without_a_usable_clip_has_no_batches() -> None:
    plan = _plain(bucket_config={"256px": {1000: (1.0, 1)}}).epoch_batches(0)
    assert len(plan) == 0
    assert list(plan) == []
    assert plan.num_clips == plan.largest_batch_bytes == 0


def test_each_clip_is_in_one_batch_at_most_and_only_remainders_are_left_out() -> None:
    sampler = _plain()
    ids = sampler.bucket_ids(0)
    rows = Counter(row for batch in sampler.epoch_batches(0) for row in batch.rows)
    assert set(rows.values()) == {1}
    for bucket_id, count in Counter(ids[ids >= 0].tolist()).items():
        used = [row for row in rows if ids[row] == bucket_id]
        assert len(used) == count - count % sampler.table.buckets[bucket_id].batch_size


def test_members_are_all_clips_of_the_bucket() -> None:
    sampler = _plain()
    ids = sampler.bucket_ids(1)
    for batch in sampler.epoch_batches(1):
        assert set(batch.rows) <= set(batch.members.tolist())
        assert batch.members.tolist() == np.flatnonzero(ids == ids[batch.rows[0]]).tolist()


def test_epochs_differ_in_order_and_are_counted_anew() -> None:
    sampler = _plain()
    lengths = [len(sampler.epoch_batches(epoch)) for epoch in range(6)]
    assert len(set(lengths)) > 1
    assert list(sampler.epoch_batches(0)) != list(sampler.epoch_batches(1))
    assert lengths == [len(sampler.epoch_batches(epoch)) for epoch in range(6)]


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_slice_of_a_plan_is_a_plan() -> None:
    for rank in range(2):
        plan = _plain(num_replicas=2, rank=rank).epoch_batches(0)
        batches = [plan[i] for i in range(len(plan))]
        assert list(plan) == batches
        assert plan[-1] == batches[-1]
        for begin, end in ((0, 5), (3, None), (None, -2), (4, 4), (10, 2), (len(plan), None)):
            part = plan[begin:end]
            assert list(part) == batches[begin:end]
            assert part.num_clips == sum(len(batch.rows) for batch in batches[begin:end])
        assert list(plan[4:][3:6]) == batches[7:10]
        with pytest.raises(IndexError):
            plan[len(plan)]
        with pytest.raises(ValueError, match="without gaps"):
            plan[::2]


def test_a_plan_knows_its_largest_batch() -> None:
    plan = _plain().epoch_batches(0)
    assert plan.largest_batch_bytes == max(3 * len(b.rows) * b.frames * b.height * b.width for b in plan)


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (3, 8), (8, 3)])
def test_a_resume_on_other_ranks_neither_repeats_nor_loses_a_clip(before: int, after: int) -> None:
    steps = 5
    one = list(_plain().epoch_batches(1))
    state = _plain(num_replicas=before).state(1, steps)
    done = steps * before
    epoch, start = _plain(num_replicas=after).resume(state)
    assert (epoch, start) == (1, done)
    plans = [list(_plain(num_replicas=after, rank=rank).epoch_batches(epoch, start)) for rank in range(after)]
    merged = [batch for step in zip(*plans, strict=True) for batch in step]
    assert merged == one[done : done + len(merged)]
    # Only what does not fill a step of all ranks is dropped, as at the end of any epoch.
    assert len(one) - done - len(merged) < after
    # A second change of ranks counts on from the first.
    again = _plain(num_replicas=after).state(epoch, 2, start)
    assert again["last_micro_batch_access_index"] == done + 2 * after
    assert again["samples"] == one[done + 2 * after].positions[0]
    assert _plain(num_replicas=before).resume(again) == Position(1, done + 2 * after)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_end_of_an_epoch_is_the_begin_of_the_next(ranks: int, drop_last: bool) -> None:
    sampler = _plain(drop_last, num_replicas=ranks)
    for epoch in (0, 1):
        steps = len(sampler.epoch_batches(epoch))
        assert sampler.resume(sampler.state(epoch, steps)) == Position(epoch + 1, 0)
        assert sampler.resume(sampler.state(epoch, steps - 1)) == Position(epoch, (steps - 1) * ranks)


def test_a_state_holds_plain_values() -> None:
    state = _plain(table_digest="abc").state(1, 7)
    assert all(type(value) in (int, str) for value in state.values())
    assert state["table_digest"] == "abc"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table_digest": "new"}, "the table's digest `new`"),
        ({"seed": 7}, "seed `7` is not the checkpoint's `42`"),
        ({"bucket_config": {"256px": {33: (1.0, 2)}}}, "digest of bucket_config"),
        ({"spatial_compression": 32}, "digest of bucket_config"),
        ({"fps_max": 16}, "digest of bucket_config"),
        ({"balance_window": 8}, "digest of bucket_config"),
    ],
)
def test_a_resume_on_other_data_is_refused_with_the_way_out(changes: dict[str, Any], words: str) -> None:
    state = _plain(table_digest="old").state(0, 3)
    with pytest.raises(UsageError, match=words) as caught:
        _plain(**{"table_digest": "old", **changes}).resume(state)
    assert caught.value.exit_code == 2
    assert "--start-epoch 0 --start-step 0" in (caught.value.hint or "")


def test_a_rate_written_as_another_kind_of_number_is_the_same_data() -> None:
    assert _plain(fps_max=24).bucket_digest == _plain(fps_max=24.0).bucket_digest


def test_a_state_that_cannot_be_is_refused() -> None:
    sampler = _plain()
    state = sampler.state(0, 3)
    with pytest.raises(CheckpointError, match="no number `epoch`"):
        sampler.resume({key: value for key, value in state.items() if key != "epoch"})
    inside = next(batch.positions[1] for batch in sampler.epoch_batches(0) if len(batch.positions) > 1)
    with pytest.raises(CheckpointError, match="no batch begins"):
        sampler.resume({**state, "samples": inside})
    with pytest.raises(CheckpointError, match="no batch begins"):
        sampler.resume({**state, "samples": 10**6})


# -- balance -----------------------------------------------------------------------------------------------------------


def _cost(batch: Batch) -> int:
    return len(batch.rows) * batch.frames * batch.height * batch.width


def test_balanced_steps_cost_alike_and_hold_the_same_batches() -> None:
    def spread(**options: Any) -> float:
        plans = [_plain(num_replicas=4, rank=rank, **options).epoch_batches(0) for rank in range(4)]
        steps = [[_cost(batch) for batch in step] for step in zip(*plans, strict=True)]
        return sum(max(step) * 4 - sum(step) for step in steps) / sum(map(sum, steps))

    assert spread(balance_window=32) < spread() / 4
    drawn = list(_plain().epoch_batches(0))
    balanced = list(_plain(balance_window=32).epoch_batches(0))
    assert Counter(map(_cost, balanced)) == Counter(map(_cost, drawn))
    assert sorted(row for b in balanced for row in b.rows) == sorted(row for b in drawn for row in b.rows)
    # Windows do not mix, and a resume needs nothing more than without.
    assert Counter(map(_cost, balanced[:32])) == Counter(map(_cost, drawn[:32]))
    sampler = _plain(balance_window=32)
    epoch, start = sampler.resume(sampler.state(0, 9))
    assert list(sampler.epoch_batches(epoch, start)) == balanced[9:]


# -- the order without buckets -----------------------------------------------------------------------------------------


def test_the_plain_order_is_as_golden() -> None:
    item = load_json("data_stateful_sampler")
    for row in item["rows"]:
        case = dict(zip(item["columns"], row, strict=True))
        for epoch in (0, 1):
            got = plain_order(
                case["n"],
                epoch=epoch,
                seed=case["seed"],
                num_replicas=case["replicas"],
                rank=case["rank"],
                drop_last=case["drop_last"],
            )
            assert got.tolist() == case[f"epoch{epoch}"]
        assert got[3:].tolist() == case["epoch1_from_3"]
        assert len(got) - 3 == case["len_after_load"]


def test_the_plain_order_goes_round_a_small_table() -> None:
    ranks = [plain_order(2, epoch=0, seed=0, num_replicas=5, rank=rank, shuffle=False).tolist() for rank in range(5)]
    assert ranks == [[0], [1], [0], [1], [0]]


# -- size --------------------------------------------------------------------------------------------------------------


def test_python_does_no_work_for_each_row() -> None:
    """Sixteen times the rows cost a few calls more, for the chunks they are handled in (speed: tests/benchmarks)."""
    rng = np.random.default_rng(0)

    def calls(rows: int) -> int:
        sampler = BucketSampler(
            rng.integers(1, 400, rows),
            rng.integers(200, 1100, rows),
            rng.integers(200, 2000, rows),
            rng.choice([24.0, 30.0, 60.0], rows),
            bucket_config={"256px": {17: (0.7, 8), 33: (1.0, 4), 65: (1.0, 2)}},
            spatial_compression=16,
            fps_max=24,
            num_replicas=8,
            seed=1,
        )

        def work() -> None:
            plan = sampler.epoch_batches(0)
            assert len(plan[: rows // 200]) == rows // 200
            assert plan.num_clips > rows // 10
            sampler.state(0, 50)

        return count_calls(work)

    few = calls(16_384)
    assert calls(16 * 16_384) < few + 4 * 600
