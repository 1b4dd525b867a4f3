"""What goes into a cache, and who makes it: the table's clips in their shapes, processes, devices."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch

from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.data.cache import ClipShape
from osora_cli.data.sampler import BucketSampler
from osora_cli.errors import SetupError


class Ranks(NamedTuple):
    """This process among those that make a cache together; they need not talk to each other."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def of_environment(cls) -> Ranks:
        """As torchrun says it."""
        names = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        return cls(*(int(os.environ.get(name, default)) for name, default in names))


def epochs_needed(config: TrainDiffusionConfig, sampler: BucketSampler) -> int:
    """Epochs whose buckets a training of this config can reach: one, where no bucket is left to chance.

    By `epochs`, or by `max_steps` of one process; on R ranks it reaches R times as many, and asks for them then.
    """
    lengths = [chance for entry in config.bucket_config.values() for chance, _ in entry.values()]
    certain = all(chance in (0, 1) if not isinstance(chance, tuple) else set(chance) <= {0, 1} for chance in lengths)
    if certain:
        return 1
    if config.max_steps is None:
        return config.epochs
    left, epoch = config.max_steps * config.accumulation_steps, 0
    while left > 0 and epoch < config.epochs:
        left -= max(1, len(sampler.epoch_batches(epoch)))
        epoch += 1
    return epoch


def clip_shapes(sampler: BucketSampler, epochs: int) -> list[tuple[int, ClipShape]]:
    """Every row in every shape that it is used in in these epochs, those of a shape together."""
    found: dict[tuple[int, int], None] = {}
    for epoch in range(epochs):
        ids = sampler.bucket_ids(epoch)
        rows = np.flatnonzero(ids >= 0)
        found.update(dict.fromkeys(zip(ids[rows].tolist(), rows.tolist(), strict=True)))
    buckets = sampler.table.buckets
    shapes = {
        (row, ClipShape(buckets[number].frames, buckets[number].height, buckets[number].width)): None
        for number, row in sorted(found)
    }
    return sorted(shapes, key=lambda pair: (pair[1], pair[0]))


def compute_device(config: TrainDiffusionConfig, ranks: Ranks | None = None) -> torch.device:
    """The CPU, or this process's GPU. Raises SetupError where a GPU is asked for and there is none."""
    ranks = ranks or Ranks.of_environment()
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError("`device` is `cuda`, and there is no GPU", where="device", hint="--device cpu")
    return torch.device("cuda", ranks.local_rank)
