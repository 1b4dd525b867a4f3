from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counting import count_calls
from support.tables import make_table, raw_row

from osora_cli.data.buckets import LeftOut
from osora_cli.data.check import bucket_report, sampler_report
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError


def _table(folder: Path, *groups: tuple[int, int, int, int, float]) -> ClipTable:
    """`(how many, frames, height, width, fps)` each."""
    rows: list[dict[str, Any]] = []
    for count, frames, height, width, fps in groups:
        suffix = "png" if math.isnan(fps) else "mp4"
        rows += [raw_row(f"{len(rows) + i}.{suffix}", "x", frames, height, width, fps) for i in range(count)]
    return make_table(folder, rows)


def _report(table: ClipTable, config: dict[str, Any], **options: Any) -> Any:
    return bucket_report(table, config, **{"spatial_compression": 16, "fps_max": 24, "seed": 0, **options})


def test_every_clip_is_counted_once(tmp_path: Path) -> None:
    table = _table(
        tmp_path,
        (7, 100, 256, 256, 24.0),
        (5, 40, 720, 1280, 30.0),
        (3, 1, 512, 512, math.nan),
        (2, 100, 100, 100, 24.0),
        (4, 5, 256, 256, 24.0),
    )
    report = _report(table, {"256px": {33: (1.0, 2), 65: (1.0, 2), 17: (1.0, 2)}}, num_replicas=2)
    assert report.left_out == {LeftOut.TOO_SMALL: 2, LeftOut.TOO_SHORT: 4, LeftOut.NO_STILLS: 3}
    counts = {(c.bucket.frames, c.bucket.ratio): (c.clips, c.micro_batches, c.remainder) for c in report.buckets}
    assert counts == {(65, "1:1"): (7, 3, 1), (17, "16:9"): (5, 2, 1)}
    assert (report.micro_batches, report.steps) == (5, 2)
    assert sum(c.cost_share for c in report.buckets) == pytest.approx(1)
    assert [c.pixels for c in report.buckets] == [3 * 2 * 65 * 256 * 256, 2 * 2 * 17 * 192 * 336]
    assert report.rows_left_out(LeftOut.NO_STILLS).tolist() == [12, 13, 14]
    assert len(report.rows_left_out()) == 9
    assert "100x100" in report.explain(15)
    assert report.summary().startswith("21 clips, 12 in buckets; 2 left out: fewer pixels")
    report.require_batches()


def test_the_report_is_of_the_sampler_and_epoch_it_is_asked_of(tmp_path: Path) -> None:
    table = _table(tmp_path, (200, 100, 256, 256, 24.0))
    columns = (table.num_frames, table.height, table.width, table.fps)
    config = {"256px": {33: (0.5, 3)}}
    sampler = BucketSampler(*columns, bucket_config=config, spatial_compression=16, fps_max=24, seed=3)
    seen = set()
    for epoch in range(4):
        report = sampler_report(sampler, epoch)
        assert report.steps == report.micro_batches == len(sampler.epoch_batches(epoch))
        (count,) = report.buckets
        assert count.clips + report.left_out[LeftOut.PROBABILITY] == 200
        seen.add(count.clips)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("group", "config", "words"),
    [
        (
            (6, 100, 144, 176, 30.0),
            {"256px": {33: (1.0, 1)}},
            ["6 left out: fewer pixels than 0.8", "`256px` needs 52429 pixels, it has 25344", "at most `177px`"],
        ),
        (
            (6, 60, 256, 256, 60.0),
            {"256px": {33: (1.0, 1)}},
            [
                "6 left out: too few frames",
                "used every 3 frames (fps_max 24): 20 frames",
                "at most 20 frames",
                "fps_max",
            ],
        ),
        ((6, 1, 256, 256, math.nan), {"256px": {33: (1.0, 1)}}, ["takes no single frames", "a length of 1 frame"]),
        ((6, 90, 256, 256, 24.0), {"256px": {33: (0.0, 1)}}, ["6 left out: not drawn", "higher probabilities"]),
        ((6, 90, 256, 256, 24.0), {"256px": {33: (1.0, 8)}}, ["6 clips, batch size 8, 0 batches", "lower batch size"]),
    ],
)
def test_no_batches_is_an_error_with_counts_and_cures(
    tmp_path: Path, group: Any, config: dict[str, Any], words: list[str]
) -> None:
    report = _report(_table(tmp_path, group), config)
    with pytest.raises(DataError) as caught:
        report.require_batches()
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert text.startswith("no bucket gives a batch: 6 clips, ")
    for each in words:
        assert each in text
    # What the message says is enough: with a resolution or length of that size there are batches.
    if "177px" in text:
        assert _report(_table(tmp_path, group), {"177px": {33: (1.0, 1)}}).steps == 6
    if "at most 20 frames" in text:
        assert _report(_table(tmp_path, group), {"256px": {20: (1.0, 1)}}).steps == 6


def test_more_ranks_than_batches_is_an_error_too(tmp_path: Path) -> None:
    report = _report(_table(tmp_path, (3, 90, 256, 256, 24.0)), {"256px": {33: (1.0, 1)}}, num_replicas=4)
    with pytest.raises(DataError, match="3 batches, 0 for each of 4 ranks") as caught:
        report.require_batches()
    assert "fewer ranks" in (caught.value.hint or "")


def test_python_does_no_work_for_each_row() -> None:
    """Sixteen times the rows cost a few calls more, for the chunks they are handled in (speed: tests/benchmarks)."""
    rng = np.random.default_rng(2)

    def calls(rows: int) -> int:
        sampler = BucketSampler(
            rng.integers(1, 300, rows),
            *rng.integers(100, 1500, (2, rows)),
            rng.choice([24.0, 30.0, 60.0, math.nan], rows),
            bucket_config={"256px": {1: (0.7, 8), 33: (0.7, 2)}, "768px": {65: (0.7, 1)}},
            spatial_compression=16,
            fps_max=24,
            num_replicas=8,
        )

        def work() -> None:
            report = sampler_report(sampler)
            assert sum(c.clips for c in report.buckets) + sum(report.left_out.values()) == rows
            assert report.lines()

        return count_calls(work)

    few = calls(16_384)
    assert calls(16 * 16_384) < few + 4 * 1500


def test_the_table_that_opens_a_log(tmp_path: Path) -> None:
    table = _table(tmp_path, (7, 100, 256, 256, 24.0), (5, 40, 720, 1280, 30.0), (2, 100, 100, 100, 24.0))
    config = {"256px": {65: (1.0, 2), 17: (1.0, 2)}}
    lines = _report(table, config, num_replicas=2).lines()
    assert lines == [
        "bucket  frames  size     ratio  clips  batch  batches  unused  Mpixel/batch  share",
        "256px       65  256x256  1:1        7      2        3       1          8.52  85.4%",
        "256px       17  336x192  16:9       5      2        2       1          2.19  14.6%",
        "epoch 0: 12 of 14 clips in buckets, 5 batches, 2 for each of 2 ranks",
        lines[4],
        "left out: 2: fewer pixels than 0.8 of every resolution",
    ]
    assert lines[4].startswith("ranks are busy ")
    alone = _report(table, config).lines()
    assert alone[3] == "epoch 0: 12 of 14 clips in buckets, 5 batches"
    assert len(alone) == 5
    idle = _report(table, {"256px": {65: (1.0, 8), 17: (1.0, 2), 1: (1.0, 1)}}).lines()
    assert idle[-2] == "no batch from: 256px x 65 frames (7 clips), 256px x 1 frame (0 clips)"
    empty = _report(table, {"1999px": {5: (1.0, 1)}}).lines()
    assert empty[0] == "no bucket has clips"


def test_a_balanced_order_keeps_ranks_busy(tmp_path: Path) -> None:
    table = _table(tmp_path, (60, 100, 256, 256, 24.0), (60, 20, 256, 256, 24.0), (60, 1, 256, 256, math.nan))
    columns = (table.num_frames, table.height, table.width, table.fps)
    config = {"256px": {1: (1.0, 1), 17: (1.0, 1), 65: (1.0, 1)}}
    busy = {}
    for window in (0, 64):
        options = {"bucket_config": config, "spatial_compression": 16, "fps_max": 24, "num_replicas": 4}
        sampler = BucketSampler(*columns, balance_window=window, **options)  # type: ignore[arg-type]
        report = sampler_report(sampler)
        ids = sampler.order(0).bucket_ids[: report.steps * 4].reshape(-1, 4)
        costs = [[sampler.table.buckets[i].pixels for i in step] for step in ids]
        expected = sum(map(sum, costs)) / sum(4 * max(step) for step in costs)
        assert report.rank_balance == pytest.approx(expected)
        busy[window] = report.rank_balance
    assert busy[0] < 0.7
    assert busy[64] > 0.93
