"""A table, a bucket config and a rank, as the batches that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osora_cli.config.schema import TrainConfig
from osora_cli.data.loader import ClipBatch, make_loader
from osora_cli.data.sampler import BucketSampler, EpochPlan
from osora_cli.data.table import ClipTable


@dataclass
class TableFeed:
    """Batches of a `video_text` table. The plan of the epoch at hand is kept: it costs a pass over the table."""

    table: ClipTable
    sampler: BucketSampler
    config: TrainConfig
    pin_memory: bool
    _plan: tuple[int, EpochPlan] | None = None

    def plan(self, epoch: int) -> EpochPlan:
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self.sampler.epoch_batches(epoch))
        return self._plan[1]

    def steps(self, epoch: int) -> int:
        return len(self.plan(epoch))

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        plan = self.plan(epoch)
        return make_loader(
            self.table,
            [plan[i] for i in range(step, len(plan))],
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
        return {**self.sampler.state(epoch, step), "table_digest": self.table.digest}
