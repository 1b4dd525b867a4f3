"""A table, a bucket config and a rank, as the batches that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osora_cli.config.schema import TrainConfig
from osora_cli.data.loader import ClipBatch, make_loader
from osora_cli.data.plan import EpochPlan
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.data.table import ClipTable


@dataclass
class TableFeed:
    """Batches of a `video_text` table.

    Attributes:
        start: where the run goes on: in its epoch the plan begins at that micro-batch, counted over all ranks, so
            that another number of ranks neither repeats nor loses a sample.
    """

    table: ClipTable
    sampler: BucketSampler
    config: TrainConfig
    pin_memory: bool
    start: Position = Position(0, 0)

    @property
    def start_step(self) -> int:
        """Micro-batches of this rank that are done in the first epoch."""
        return self.start.start // self.sampler.num_replicas

    def steps(self, epoch: int) -> int:
        return self._done_before(epoch) + len(self._plan(epoch))

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        return make_loader(
            self.table,
            self._plan(epoch)[step - self._done_before(epoch) :],
            seed=self.config.seed,
            epoch=epoch,
            num_workers=self.config.num_workers,
            prefetch_factor=self.config.prefetch_factor,
            fps_max=self.config.dataset.fps_max,
            rand_sample_interval=self.config.dataset.rand_sample_interval,
            max_bad_fraction=self.config.dataset.max_bad_fraction,
            pin_memory=self.pin_memory,
        )

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        return self.sampler.state(epoch, step - self._done_before(epoch), self._first(epoch))

    def _plan(self, epoch: int) -> EpochPlan:
        return self.sampler.epoch_batches(epoch, self._first(epoch))

    def _first(self, epoch: int) -> int:
        return self.start.start if epoch == self.start.epoch else 0

    def _done_before(self, epoch: int) -> int:
        return self.start_step if epoch == self.start.epoch else 0
