"""One epoch as a list of batches: which clips, in which order, on which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from osora_cli.data.buckets import Bucket


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        rows: of the table.
        frames, height, width: of every clip in it; pixels.
        positions: of the clips in the epoch's order over all ranks, counted from 0. No two clips of an epoch share
            one, and it does not depend on the number of ranks: every random draw for a clip is keyed by it.
        members: rows of all clips in this bucket this epoch, which one that cannot be read is replaced from.
    """

    rows: tuple[int, ...]
    frames: int
    height: int
    width: int
    positions: tuple[int, ...]
    members: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64), compare=False, repr=False)


@dataclass(frozen=True)
class EpochOrder:
    """The order of an epoch's micro-batches, the same on all ranks.

    Attributes:
        epoch: which one.
        rows: of all micro-batches, bucket after bucket.
        begins: where each micro-batch begins in `rows`, in the epoch's order, [M].
        bucket_ids: bucket of each micro-batch, in the epoch's order, [M].
        offsets: samples before each micro-batch, [M + 1]; the last is the epoch's number of samples.
        members: rows of each bucket before any was dropped or repeated.
        drop_last: micro-batches that not every rank would get are left out; else the first ones are repeated.
    """

    epoch: int
    buckets: Sequence[Bucket]
    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    bucket_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    members: dict[int, NDArray[np.int64]]
    drop_last: bool

    @property
    def num_micro_batches(self) -> int:
        """Over all ranks, without those repeated to give every rank as many."""
        return len(self.begins)

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def steps(self, start: int, num_replicas: int) -> int:
        """Micro-batches that each rank has from micro-batch `start` on."""
        left = max(0, self.num_micro_batches - start)
        return left // num_replicas if self.drop_last else -(-left // num_replicas)

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the epoch. Past the end the epoch begins again, under positions of its own."""
        again, index = divmod(number, self.num_micro_batches)
        bucket_id = int(self.bucket_ids[index])
        bucket = self.buckets[bucket_id]
        begin, first = int(self.begins[index]), int(self.offsets[index]) + again * self.num_samples
        return Batch(
            rows=tuple(self.rows[begin : begin + bucket.batch_size].tolist()),
            frames=bucket.frames,
            height=bucket.height,
            width=bucket.width,
            positions=tuple(range(first, first + bucket.batch_size)),
            members=self.members[bucket_id],
        )


@dataclass(frozen=True)
class EpochPlan(Sequence[Batch]):
    """The batches of one rank in one epoch, in order. A slice of it is a plan again, and costs nothing.

    Attributes:
        order: the epoch's order over all ranks.
        start: micro-batch, over all ranks, that this rank's batch 0 belongs to the group of.
    """

    order: EpochOrder
    start: int
    num_replicas: int
    rank: int
    length: int

    @property
    def epoch(self) -> int:
        return self.order.epoch

    @property
    def num_clips(self) -> int:
        """Clips of all its batches."""
        return int(self._batch_sizes.sum())

    @property
    def largest_batch_bytes(self) -> int:
        """Bytes of the largest of its batches, as RGB in uint8."""
        used = (self.order.buckets[i] for i in np.unique(self.order.bucket_ids).tolist())
        return max((3 * bucket.pixels for bucket in used), default=0)

    @property
    def _batch_sizes(self) -> NDArray[np.int64]:
        numbers = self.start + self.rank + np.arange(self.length) * self.num_replicas
        return np.diff(self.order.offsets)[numbers % max(1, self.order.num_micro_batches)]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> EpochPlan: ...
    def __getitem__(self, index: int | slice) -> Batch | EpochPlan:
        if isinstance(index, slice):
            begin, end, step = index.indices(self.length)
            if step != 1:
                raise ValueError(f"a plan is sliced without gaps, not with step {step}")
            start = self.start + begin * self.num_replicas
            return replace(self, start=start, length=max(0, end - begin))
        if not -self.length <= index < self.length:
            raise IndexError(f"batch {index} of {self.length}")
        return self.order.batch(self.start + index % self.length * self.num_replicas + self.rank)

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(self.length))


def order_epoch(
    bucket_ids: NDArray[np.int32],
    buckets: Sequence[Bucket],
    *,
    epoch: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    balance_window: int = 0,
) -> EpochOrder:
    """Groups the clips by bucket and puts the micro-batches in order. Rule: algorithms, part 7.

    Args:
        bucket_ids: bucket of each row of the table, -1 for none.
        seed: the run's; one generator, seeded with `seed + epoch`, shuffles the clips of each bucket, then the
            micro-batches.
        drop_last: leave out clips that do not fill a micro-batch; else fill it with the bucket's first ones. No clip
            is repeated more than once for that, so a bucket of less than half a batch is left out in any case.
        balance_window: sort each run of so many micro-batches by cost, rising and falling in turn, so that the ranks'
            batches of one step cost about the same; 0: leave the order as it is drawn.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    grouped = _group(bucket_ids)
    parts, order_of_buckets, counts = [], [], []
    for bucket_id, rows in grouped.items():
        batch_size = buckets[bucket_id].batch_size
        remainder = len(rows) % batch_size
        if remainder:
            rows = rows[:-remainder] if drop_last else np.concatenate([rows, rows[: batch_size - remainder]])
        if shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator).numpy()]
        parts.append(rows)
        order_of_buckets.append(bucket_id)
        counts.append(len(rows) // batch_size)
    places = np.repeat(np.arange(len(counts)), counts)
    if shuffle:
        places = places[torch.randperm(len(places), generator=generator).numpy()]
    ids = np.array(order_of_buckets, dtype=np.int32)
    if balance_window > 1:
        places = _balance(places, np.array([buckets[i].pixels for i in order_of_buckets]), balance_window)
    sizes = np.array([buckets[i].batch_size for i in order_of_buckets], dtype=np.int64)
    bases = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int64)
    begins = bases[places] + _occurrence(places) * (sizes[places] if len(places) else 1)
    return EpochOrder(
        epoch=epoch,
        buckets=buckets,
        rows=np.concatenate(parts) if parts else np.empty(0, dtype=np.int64),
        begins=begins,
        bucket_ids=ids[places],
        offsets=np.concatenate([[0], np.cumsum(sizes[places])]).astype(np.int64),
        members=grouped,
        drop_last=drop_last,
    )


def _group(bucket_ids: NDArray[np.int32]) -> dict[int, NDArray[np.int64]]:
    """Rows of each bucket, rising; buckets in the order in which they first appear."""
    used = np.flatnonzero(bucket_ids >= 0)
    ids = bucket_ids[used]
    by_bucket = np.argsort(ids, kind="stable")
    found, first, counts = np.unique(ids, return_index=True, return_counts=True)
    ends = np.cumsum(counts)
    return {int(found[i]): used[by_bucket[ends[i] - counts[i] : ends[i]]].astype(np.int64) for i in np.argsort(first)}


def _occurrence(places: NDArray[np.intp]) -> NDArray[np.int64]:
    """How many entries of the same value stand before each."""
    by_place = np.argsort(places, kind="stable")
    counts = np.bincount(places) if len(places) else np.empty(0, dtype=np.int64)
    out = np.empty(len(places), dtype=np.int64)
    out[by_place] = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return out


def _balance(places: NDArray[np.intp], costs: NDArray[np.int64], window: int) -> NDArray[np.intp]:
    """Sorted by cost inside each window. Every other window falls, so that like costs meet where two windows join."""
    number = np.arange(len(places)) // window
    cost = costs[places]
    return places[np.lexsort((np.where(number % 2 == 0, cost, -cost), number))]


def plain_order(
    count: int, *, epoch: int, seed: int, num_replicas: int, rank: int, shuffle: bool = True, drop_last: bool = False
) -> NDArray[np.int64]:
    """Rows of one rank in an epoch of a table without buckets, as torch's DistributedSampler has them.

    All ranks get equally many: the epoch's first rows come again at its end, or with `drop_last` the last ones are
    left out.
    """
    rows = np.arange(count)
    if shuffle:
        rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    per_rank = count // num_replicas if drop_last else -(-count // num_replicas)
    return np.resize(rows, per_rank * num_replicas)[rank::num_replicas].astype(np.int64)
