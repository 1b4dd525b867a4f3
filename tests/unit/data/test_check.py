from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def test_a_million_rows_take_seconds() -> None:
    rng = np.random.default_rng(2)
    count = 1_000_000
    for probability in (1.0, 0.7):
        sampler = BucketSampler(
            rng.integers(1, 300, count),
            *rng.integers(100, 1500, (2, count)),
            rng.choice([24.0, 30.0, 60.0, math.nan], count),
            bucket_config={"256px": {1: (probability, 8), 33: (probability, 2)}, "768px": {65: (probability, 1)}},
            spatial_compression=16,
            fps_max=24,
            num_replicas=8,
        )
        began = time.process_time()
        report = sampler_report(sampler)
        assert report.steps > 0
        assert sum(c.clips for c in report.buckets) + sum(report.left_out.values()) == count
        assert time.process_time() - began < 30
