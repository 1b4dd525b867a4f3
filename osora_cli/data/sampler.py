"""Order of clips over epochs and ranks, and the position in it that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from osora_cli.data.buckets import BucketTable
from osora_cli.data.fps import frame_intervals
from osora_cli.data.plan import Batch, EpochOrder, EpochPlan, order_epoch
from osora_cli.errors import CheckpointError, UsageError

__all__ = ["Batch", "BucketSampler", "EpochPlan", "Position"]

_START_ANEW = "begin the data anew with `--start-epoch 0 --start-step 0` (weights, optimizer and schedule are kept)"


class Position(NamedTuple):
    """Where to go on: the epoch, and the micro-batch in it counted over all ranks."""

    epoch: int
    start: int


class BucketSampler:
    """Batches of clips of one shape each, in the order of Open-Sora for the same seed.

    Everything follows from seed, epoch and table, so each rank makes its own plan and nothing is exchanged. Every rank
    has as many batches as every other. An epoch's length is that of its own buckets: where a probability is below 1
    epochs differ.

    Args:
        num_frames, height, width, fps: columns of the table, [N] each.
        bucket_config: `{resolution: {frames: (probability, batch size)}}`, see `BucketTable`.
        spatial_compression: of the autoencoder; what height and width of the buckets are multiples of.
        fps_max: largest rate wanted, frames a second; None: no limit.
        num_replicas: ranks that read different clips.
        rank: 0 to num_replicas - 1.
        seed: the run's.
        shuffle: else clips stay in the table's order, bucket after bucket.
        drop_last: leave out clips that do not fill a batch, and batches that do not fill a step of all ranks; else
            clips and batches are repeated.
        balance_window: batches sorted by cost at a time, see `order_epoch`; 0: none.
        table_digest: of the table, kept in the state; empty: not compared.

    Raises:
        ConfigError: `bucket_config` is wrong.
    """

    def __init__(
        self,
        num_frames: NDArray[np.int64],
        height: NDArray[np.int64],
        width: NDArray[np.int64],
        fps: NDArray[np.float64],
        *,
        bucket_config: Mapping[str, Mapping[int, Any]],
        spatial_compression: int,
        fps_max: float | None,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 1024,
        shuffle: bool = True,
        drop_last: bool = True,
        balance_window: int = 0,
        table_digest: str = "",
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} of {num_replicas}")
        self.table = BucketTable(bucket_config, spatial_compression)
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        self.table_digest = table_digest
        self._columns = (num_frames, height, width, fps)
        self._fps_max, self._shuffle, self._drop_last = fps_max, shuffle, drop_last
        self._balance_window = balance_window
        self._order: EpochOrder | None = None
        self._ids: tuple[int, NDArray[np.int32]] | None = None

    @property
    def bucket_digest(self) -> str:
        """Of bucket_config, spatial compression, fps_max and the options: all that the order follows from but seed
        and table."""
        rate = None if self._fps_max is None else float(self._fps_max)
        parts = (self.table.digest(), rate, self._shuffle, self._drop_last, self._balance_window)
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())

    @property
    def areas(self) -> NDArray[np.int64]:
        """Pixels of each row's frame."""
        _, height, width, _ = self._columns
        return height * width

    @property
    def used_frames(self) -> NDArray[np.int64]:
        """Frames of each row at the rate it is used at."""
        num_frames, _, _, fps = self._columns
        return num_frames // frame_intervals(fps, self._fps_max)

    def bucket_ids(self, epoch: int) -> NDArray[np.int32]:
        """Bucket of each row in this epoch, its place in `table.buckets`; -1: in none. The last answer is kept."""
        if self._ids is None or self._ids[0] != epoch:
            ids = self.table.assign(*self._columns, fps_max=self._fps_max, seed=self.seed + epoch)
            self._ids = (epoch, ids)
        return self._ids[1]

    def left_out(self, epoch: int) -> NDArray[np.int8]:
        """Why each row is in no bucket this epoch (`LeftOut`); 0 where it is in one."""
        return self.table.left_out(self.bucket_ids(epoch), *self._columns, fps_max=self._fps_max)

    def explain(self, row: int) -> str:
        """A row's way past the buckets in words, see `BucketTable.explain`."""
        num_frames, height, width, fps = (column[row] for column in self._columns)
        return self.table.explain(int(num_frames), int(height), int(width), float(fps), fps_max=self._fps_max)

    def order(self, epoch: int) -> EpochOrder:
        """The epoch's order over all ranks. The last one asked for is kept: it costs a pass over the table."""
        if self._order is None or self._order.epoch != epoch:
            self._order = order_epoch(
                self.bucket_ids(epoch),
                self.table.buckets,
                epoch=epoch,
                seed=self.seed,
                shuffle=self._shuffle,
                drop_last=self._drop_last,
                balance_window=self._balance_window,
            )
        return self._order

    def epoch_batches(self, epoch: int, start: int = 0) -> EpochPlan:
        """This rank's batches of an epoch, from micro-batch `start` (counted over all ranks) on.

        `start` need not be a multiple of the number of ranks, so a run that stopped on other ranks goes on exactly
        where it was.
        """
        order = self.order(epoch)
        length = order.steps(start, self.num_replicas)
        return EpochPlan(order, start=start, num_replicas=self.num_replicas, rank=self.rank, length=length)

    def state(self, epoch: int, step: int, start: int = 0) -> dict[str, Any]:
        """Plain values to keep in a checkpoint after `step` batches of `epoch_batches(epoch, start)` on each rank.

        `seed`, `epoch` and `last_micro_batch_access_index` are as Open-Sora has them; `samples` is the position in
        samples, which holds for any number of ranks.
        """
        order = self.order(epoch)
        reached = start + step * self.num_replicas
        return {
            "seed": self.seed,
            "epoch": epoch,
            "last_micro_batch_access_index": reached,
            "samples": int(order.offsets[min(reached, order.num_micro_batches)]),
            "bucket_digest": self.bucket_digest,
            "table_digest": self.table_digest,
        }

    def resume(self, state: Mapping[str, Any]) -> Position:
        """Where to go on after `state`, whatever the number of ranks was. The end of an epoch is the next one's begin.

        A state of Open-Sora has neither digests nor a position in samples: then its micro-batch index is taken.

        Raises:
            UsageError: table, bucket_config or seed are not those of the state.
            CheckpointError: the state lacks a value, or its position is in no micro-batch's place.
        """
        for key in ("seed", "epoch", "last_micro_batch_access_index"):
            if not isinstance(state.get(key), int):
                raise CheckpointError(f"the sampler's state has no number `{key}`")
        self._check_same(state)
        epoch, start = int(state["epoch"]), int(state["last_micro_batch_access_index"])
        order = self.order(epoch)
        samples = state.get("samples")
        if samples is not None:
            place = int(np.searchsorted(order.offsets, samples))
            if place > order.num_micro_batches or order.offsets[place] != samples:
                raise CheckpointError(f"the sampler's state is at sample {samples}, where no batch begins")
            start = place
        return Position(epoch, start) if order.steps(start, self.num_replicas) else Position(epoch + 1, 0)

    def _check_same(self, state: Mapping[str, Any]) -> None:
        def differ(what: str, then: object, now: object) -> UsageError:
            return UsageError(f"{what} `{now}` is not the checkpoint's `{then}`", hint=_START_ANEW)

        if state["seed"] != self.seed:
            raise differ("seed", state["seed"], self.seed)
        if state.get("table_digest") and self.table_digest and state["table_digest"] != self.table_digest:
            raise differ("the table's digest", state["table_digest"], self.table_digest)
        if state.get("bucket_digest") and state["bucket_digest"] != self.bucket_digest:
            raise differ("the digest of bucket_config", state["bucket_digest"], self.bucket_digest)
