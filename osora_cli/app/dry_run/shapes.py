"""The shapes of batch that a training's largest step may have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from osora_cli.config.schema import TrainConfig, TrainVaeConfig
from osora_cli.data.buckets import Bucket
from osora_cli.data.check import BucketReport


@dataclass(frozen=True)
class Shape:
    """A batch: clips of `frames` frames of `height` x `width` px."""

    clips: int
    frames: int
    height: int
    width: int

    @property
    def positions(self) -> int:
        return self.clips * self.frames * self.height * self.width


def batch_shapes(config: TrainConfig, buckets: Iterable[Bucket]) -> list[Shape]:
    """The batch with the most pixels, and the stills that it may be turned into; empty without a bucket."""
    shapes = [Shape(bucket.batch_size, bucket.frames, bucket.height, bucket.width) for bucket in buckets]
    if not shapes:
        return []
    largest = max(shapes, key=lambda shape: shape.positions)
    return [largest, *_stills(config, largest)]


def filled_buckets(report: BucketReport) -> list[Bucket]:
    """Those that have clips for a whole batch, as no other makes one."""
    return [count.bucket for count in report.buckets if count.micro_batches]


def _stills(config: TrainConfig, shape: Shape) -> list[Shape]:
    """All frames of the clips as so many stills: as many pixels, but not the same memory, for the depth of time that a
    network cannot compress is kept. Other ways of mixing take less than the clips."""
    if not isinstance(config, TrainVaeConfig) or shape.frames == 1 or config.mixed_image_ratio == 0:
        return []
    if config.mixed_strategy != "mixed_video_image" or config.mixed_image_rule != "balanced":
        return []
    return [Shape(shape.clips * shape.frames, 1, shape.height, shape.width)]
