"""What the bucket rules make of a table: batches per bucket, and every clip that is left out, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osora_cli.data.buckets import Bucket, LeftOut
from osora_cli.data.plan import EpochOrder
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError
from osora_cli.words import counted

_SHOWN = 5
_MEGA = 1e6
REASONS = {
    LeftOut.TOO_SMALL: "fewer pixels than 0.8 of every resolution",
    LeftOut.TOO_SHORT: "too few frames at the rate they are used at",
    LeftOut.NO_STILLS: "a single frame, and no resolution of its size takes those",
    LeftOut.PROBABILITY: "not drawn this epoch",
}


@dataclass(frozen=True)
class BucketCount:
    """One bucket in one epoch.

    Attributes:
        clips: in the bucket.
        micro_batches: that they make, over all ranks.
        remainder: clips that fill no micro-batch and are left out of this epoch.
        pixels: of all its micro-batches over all frames.
        cost_share: of the epoch's pixels, from 0 to 1: about the share of the epoch's time.
    """

    bucket: Bucket
    clips: int
    micro_batches: int
    remainder: int
    pixels: int
    cost_share: float


@dataclass(frozen=True)
class BucketReport:
    """A table under a bucket config, in one epoch.

    Attributes:
        buckets: those that have clips, as `BucketTable` orders them.
        micro_batches: over all ranks.
        steps: micro-batches of each rank.
        reasons: why each row is in no bucket (`LeftOut`), 0 where it is in one, int8 [rows].
        rank_balance: share of the ranks' time that is not spent waiting for the rank with the dearest batch of the
            step, from 1 / num_replicas to 1, the cost of a batch taken as its pixels; 1 for a single rank.
    """

    epoch: int
    num_clips: int
    num_replicas: int
    buckets: list[BucketCount]
    micro_batches: int
    steps: int
    reasons: NDArray[np.int8]
    rank_balance: float
    _sampler: BucketSampler

    @property
    def left_out(self) -> dict[LeftOut, int]:
        """Clips in no bucket, by reason; only reasons that occur."""
        counts = np.bincount(self.reasons, minlength=len(LeftOut) + 1)
        return {reason: int(counts[reason]) for reason in LeftOut if counts[reason]}

    def rows_left_out(self, reason: LeftOut | None = None) -> NDArray[np.int64]:
        """Rows in no bucket, of one reason or of any."""
        return np.flatnonzero(self.reasons == reason if reason is not None else self.reasons > 0).astype(np.int64)

    def explain(self, row: int) -> str:
        """One row in words: its frames, how many of them are used, and what each resolution asks."""
        return self._sampler.explain(row)

    def summary(self) -> str:
        """The counts in one line."""
        parts = [f"{counted(self.num_clips, 'clip')}, {self.num_clips - int((self.reasons > 0).sum())} in buckets"]
        parts += [f"{count} left out: {REASONS[reason]}" for reason, count in self.left_out.items()]
        parts.append(f"{counted(self.micro_batches, 'batch', 'batches')}{self._each()}")
        return "; ".join(parts)

    def lines(self) -> list[str]:
        """The buckets that have clips as a table, a line each, then the counts: what opens a training's log.

        `unused` clips fill no batch this epoch; `share` is of the epoch's pixels, about that of its time.
        """
        head = ("bucket", "frames", "size", "ratio", "clips", "batch", "batches", "unused", "Mpixel/batch", "share")
        rows = [head, *(self._cells(count) for count in self.buckets)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        left = (0, 2, 3)  # names to the left, numbers to the right
        table = [
            "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return [*(table if self.buckets else ["no bucket has clips"]), *self._totals()]

    @staticmethod
    def _cells(count: BucketCount) -> tuple[str, ...]:
        b = count.bucket
        numbers = (str(count.clips), str(b.batch_size), str(count.micro_batches), str(count.remainder))
        cost = (f"{b.pixels / _MEGA:.2f}", f"{count.cost_share:.1%}")
        return (b.resolution, str(b.frames), f"{b.width}x{b.height}", b.ratio, *numbers, *cost)

    def _totals(self) -> list[str]:
        used = self.num_clips - int((self.reasons > 0).sum())
        clips = f"{used} of {counted(self.num_clips, 'clip')} in buckets"
        lines = [f"epoch {self.epoch}: {clips}, {counted(self.micro_batches, 'batch', 'batches')}{self._each()}"]
        if self.num_replicas > 1 and self.steps:
            lines.append(f"ranks are busy {self.rank_balance:.1%} of the time, then wait for a step's dearest batch")
        idle = self._without_batches()
        if idle:
            lines.append(f"no batch from: {', '.join(idle)}")
        return [*lines, *(f"left out: {count}: {REASONS[reason]}" for reason, count in self.left_out.items())]

    def _each(self) -> str:
        return f", {self.steps} for each of {self.num_replicas} ranks" if self.num_replicas > 1 else ""

    def _without_batches(self) -> list[str]:
        """Lengths of the config, over all ratios, that give no batch this epoch: they are passed over."""
        clips: dict[tuple[str, int], int] = {(b.resolution, b.frames): 0 for b in self._sampler.table.buckets}
        batches = dict.fromkeys(clips, 0)
        for count in self.buckets:
            key = (count.bucket.resolution, count.bucket.frames)
            clips[key] += count.clips
            batches[key] += count.micro_batches
        return [
            f"{name} x {counted(frames, 'frame')} ({counted(number, 'clip')})"
            for (name, frames), number in clips.items()
            if not batches[(name, frames)]
        ]

    def require_batches(self) -> None:
        """Raises DataError, with counts and what to change, when no rank gets a batch."""
        if self.steps > 0:
            return
        lines = [f"no bucket gives a batch: {self.summary()}"]
        lines += [self._short_of(count) for count in self.buckets[:_SHOWN]]
        for reason in self.left_out:
            row = int(self.rows_left_out(reason)[0])
            lines.append(f"row {row}: {self.explain(row)}")
        raise DataError("\n  ".join(lines), where="bucket_config", hint="; ".join(self._cures()))

    def _short_of(self, count: BucketCount) -> str:
        b = count.bucket
        shape = f"`{b.resolution}` {counted(b.frames, 'frame')} {b.width}x{b.height}"
        given = counted(count.micro_batches, "batch", "batches")
        return f"bucket {shape}: {counted(count.clips, 'clip')}, batch size {b.batch_size}, {given}"

    def _cures(self) -> list[str]:
        cures = []
        left_out = self.left_out
        if LeftOut.TOO_SMALL in left_out:
            largest = int(self._sampler.areas[self.rows_left_out(LeftOut.TOO_SMALL)].max())
            side = int((largest / 0.8) ** 0.5)
            cures.append(f"a resolution of at most `{side}px` in bucket_config takes the largest of the small clips")
        if LeftOut.TOO_SHORT in left_out:
            longest = int(self._sampler.used_frames[self.rows_left_out(LeftOut.TOO_SHORT)].max())
            cures.append(
                f"a length of at most {longest} frames takes the longest of the short clips, "
                "a higher `--dataset.fps_max` makes clips of a high rate longer"
            )
        if LeftOut.NO_STILLS in left_out:
            cures.append("a length of 1 frame in bucket_config takes single frames")
        if LeftOut.PROBABILITY in left_out:
            cures.append("higher probabilities in bucket_config draw more clips")
        if self.buckets:
            cures.append("a lower batch size in bucket_config, or fewer ranks")
        return cures


def sampler_report(sampler: BucketSampler, epoch: int = 0) -> BucketReport:
    """What a sampler makes of its table in an epoch. One vectorised pass; the epoch's order is kept for training."""
    order = sampler.order(epoch)
    ids = sampler.bucket_ids(epoch)
    buckets = sampler.table.buckets
    clips = np.bincount(ids[ids >= 0], minlength=len(buckets))
    batches = np.bincount(order.bucket_ids, minlength=len(buckets))
    total = sum(int(batches[i]) * buckets[i].pixels for i in np.flatnonzero(batches).tolist())
    counts = [_count(buckets[i], int(clips[i]), int(batches[i]), total) for i in np.flatnonzero(clips).tolist()]
    return BucketReport(
        epoch=epoch,
        num_clips=len(ids),
        num_replicas=sampler.num_replicas,
        buckets=counts,
        micro_batches=order.num_micro_batches,
        steps=order.steps(0, sampler.num_replicas),
        reasons=sampler.left_out(epoch),
        rank_balance=_rank_balance(order, sampler.num_replicas),
        _sampler=sampler,
    )


def _rank_balance(order: EpochOrder, num_replicas: int) -> float:
    steps = order.steps(0, num_replicas)
    if not steps:
        return 1.0
    pixels = np.array([bucket.pixels for bucket in order.buckets], dtype=np.float64)
    cost = np.resize(pixels[order.bucket_ids], steps * num_replicas).reshape(steps, num_replicas)
    return float(cost.sum() / (cost.max(axis=1).sum() * num_replicas))


def _count(bucket: Bucket, clips: int, batches: int, total: int) -> BucketCount:
    pixels = batches * bucket.pixels
    return BucketCount(
        bucket=bucket,
        clips=clips,
        micro_batches=batches,
        remainder=max(0, clips - batches * bucket.batch_size),
        pixels=pixels,
        cost_share=pixels / total if total else 0.0,
    )


def bucket_report(
    table: ClipTable,
    bucket_config: Mapping[str, Mapping[int, Any]],
    *,
    spatial_compression: int,
    fps_max: float | None,
    seed: int = 1024,
    num_replicas: int = 1,
    drop_last: bool = True,
    epoch: int = 0,
) -> BucketReport:
    """What the rules make of a table; arguments as `BucketSampler`."""
    sampler = BucketSampler(
        table.num_frames,
        table.height,
        table.width,
        table.fps,
        bucket_config=bucket_config,
        spatial_compression=spatial_compression,
        fps_max=fps_max,
        num_replicas=num_replicas,
        seed=seed,
        drop_last=drop_last,
        table_digest=table.digest,
    )
    return sampler_report(sampler, epoch)
