"""Settings that a config may give in two places: the top-level one wins, as in Open-Sora."""

from __future__ import annotations

from osora_cli.config.schema import TrainConfig


def effective_lr(config: TrainConfig) -> float:
    """Learning rate after the warm-up: `lr`, else `optim.lr`."""
    return config.optim.lr if config.lr is None else config.lr


def effective_warmup_steps(config: TrainConfig) -> int:
    """Updates of linear warm-up: `warmup_steps`, else `lr_scheduler.warmup_steps`, else 0."""
    steps = config.lr_scheduler.warmup_steps if config.warmup_steps is None else config.warmup_steps
    return steps or 0
