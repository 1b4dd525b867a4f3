"""A table, a bucket config and a rank, as the batches that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from osora_cli.config.schema import TrainConfig
from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.plan import EpochPlan
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.data.table import ClipTable


class TableFeed:
    """Batches of a `video_text` table, read by workers that stay for the whole run.

    Args:
        start: where the run goes on: in its epoch the plan begins at that micro-batch, counted over all ranks, so
            that another number of ranks neither repeats nor loses a sample.
        pin_memory: page-locked batches, for a GPU.
    """

    def __init__(
        self, table: ClipTable, sampler: BucketSampler, config: TrainConfig, start: Position, *, pin_memory: bool
    ) -> None:
        self._sampler = sampler
        self._start = start
        self._loader = ClipLoader(
            table,
            seed=config.seed,
            fps_max=config.dataset.fps_max,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            rand_sample_interval=config.dataset.rand_sample_interval,
            max_bad_fraction=config.dataset.max_bad_fraction,
            motion_score=config.dataset.vmaf,
            pin_memory=pin_memory,
        )

    @property
    def start_step(self) -> int:
        """Micro-batches of this rank that are done in the first epoch."""
        return self._start.start // self._sampler.num_replicas

    def steps(self, epoch: int) -> int:
        return self._done_before(epoch) + len(self._plan(epoch))

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        return self._loader.read(self._plan(epoch)[step - self._done_before(epoch) :], epoch)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        return self._sampler.state(epoch, step - self._done_before(epoch), self._first(epoch))

    def close(self) -> None:
        """End the workers."""
        self._loader.close()

    def _plan(self, epoch: int) -> EpochPlan:
        return self._sampler.epoch_batches(epoch, self._first(epoch))

    def _first(self, epoch: int) -> int:
        return self._start.start if epoch == self._start.epoch else 0

    def _done_before(self, epoch: int) -> int:
        return self.start_step if epoch == self._start.epoch else 0
