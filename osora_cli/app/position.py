"""Where in the data a run begins."""

from __future__ import annotations

from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.schema import TrainConfig
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.errors import UsageError
from osora_cli.words import counted


def start_position(config: TrainConfig, sampler: BucketSampler, reader: CheckpointReader | None) -> Position:
    """As the config tells, as the checkpoint says, or the start.

    Raises:
        UsageError: `start_epoch` or `start_step` without a checkpoint, or beyond the data.
    """
    if config.start_epoch is not None or config.start_step is not None:
        return _told_position(config, sampler, reader)
    if reader is None:
        return Position(0, 0)
    state = reader.small("sampler")
    if state is None:
        counters = reader.counters
        state = {
            "seed": config.seed,
            "epoch": counters.epoch,
            "last_micro_batch_access_index": counters.step * sampler.num_replicas,
        }
    return sampler.resume(state)


def _told_position(config: TrainConfig, sampler: BucketSampler, reader: CheckpointReader | None) -> Position:
    """`start_epoch` and `start_step`; the one that is not given is the checkpoint's epoch, or 0."""
    if reader is None:
        raise UsageError(
            "`start_epoch` and `start_step` say where to go on, and no checkpoint is loaded",
            hint="give one with `--load CKPT`",
        )
    epoch = reader.counters.epoch if config.start_epoch is None else config.start_epoch
    step = config.start_step or 0
    if epoch >= config.epochs:
        raise UsageError(f"`start_epoch` is `{epoch}`, and the run has {config.epochs} epochs, counted from 0")
    steps = len(sampler.epoch_batches(epoch))
    if step > steps:
        raise UsageError(f"`start_step` is `{step}`, and epoch {epoch} has {counted(steps, 'batch', 'batches')}")
    return Position(epoch, step * sampler.num_replicas)
