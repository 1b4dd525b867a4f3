"""The learning rate of a run, as its config and the checkpoint that it goes on from have it."""

from __future__ import annotations

from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.schema import TrainConfig
from osora_cli.config.sections import LrSchedulerConfig
from osora_cli.config.values import effective_lr, effective_warmup_steps
from osora_cli.data.sampler import BucketSampler
from osora_cli.trainer.schedule import Schedule


def total_updates(config: TrainConfig, sampler: BucketSampler) -> int:
    """Updates of the whole run; epochs are taken to be as long as the first one, where `max_steps` does not say."""
    if config.max_steps is not None:
        return config.max_steps
    return config.epochs * len(sampler.epoch_batches(0)) // config.accumulation_steps


def run_schedule(
    config: TrainConfig, sampler: BucketSampler, reader: CheckpointReader | None, notes: list[str]
) -> Schedule:
    """The first network's schedule; see `make_schedule`."""
    return make_schedule(
        config.lr_scheduler,
        reader,
        notes,
        lr=effective_lr(config),
        warmup_steps=effective_warmup_steps(config),
        update_warmup_steps=config.update_warmup_steps,
        total=total_updates(config, sampler),
    )


def make_schedule(
    scheduler: LrSchedulerConfig,
    reader: CheckpointReader | None,
    notes: list[str],
    *,
    lr: float,
    warmup_steps: int,
    update_warmup_steps: bool,
    total: int,
    name: str = "lr_scheduler",
) -> Schedule:
    """The config's learning rate. The warm-up goes on as it was begun, unless `update_warmup_steps` says otherwise.

    Args:
        name: the schedule's file in a checkpoint.
        notes: what differs from the checkpoint is added here.
    """
    warmup, initial = warmup_steps, scheduler.initial_lr
    begun = reader.small(name) if reader is not None else None
    whose = "" if name == "lr_scheduler" else f" ({name})"
    if begun is not None and not update_warmup_steps:
        kept = (int(begun.get("warmup_steps", warmup)), float(begun.get("initial_lr", initial)))
        if kept != (warmup, initial):
            notes.append(
                f"the warm-up goes on as the checkpoint has it{whose}: {kept[0]} updates from {kept[1]:g} "
                "(`--update-warmup-steps` takes the config's)"
            )
        warmup, initial = kept
    if begun is not None and begun.get("base_lrs") not in (None, [lr]):
        notes.append(f"learning rate{whose}: {lr:g}, in the checkpoint {begun['base_lrs'][0]:g}")
    return Schedule(lr, warmup, initial, scheduler.use_cosine_scheduler, total)
