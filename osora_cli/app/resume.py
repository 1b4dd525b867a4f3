"""Going on with a run: its own config, its newest checkpoint that verifies, the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from osora_cli.app.recipes import check_training
from osora_cli.app.runs import plan_resume
from osora_cli.app.train import TrainResult, run
from osora_cli.config.freeze import Change, check_resume, thaw
from osora_cli.config.overrides import Override
from osora_cli.config.schema import TrainConfig
from osora_cli.errors import UsageError


def resume(
    target: Path, overrides: Sequence[Override] = (), *, quiet: bool = False, json_mode: bool = False
) -> TrainResult:
    """Go on with the run `target`, or with the run of the checkpoint `target` from that checkpoint.

    Args:
        overrides: changes to the run's config; what the model or the optimizer could not follow is refused.

    Raises:
        CheckpointError: nothing there verifies.
        ConfigError: the run's config is missing, or an override changes what a resume cannot change.
    """
    for override in overrides:
        if override.path == ("load",):
            raise UsageError(
                f"`{override.flag}`: a resume goes on with the run itself",
                hint="`osora train ... --load CKPT` starts a run of its own from a checkpoint",
            )
    plan = plan_resume(target)
    old = thaw(plan.folder).config
    frozen = thaw(plan.folder, overrides)
    new = frozen.config
    if not isinstance(new, TrainConfig):
        raise UsageError(f"`{plan.folder}` is no run that this osora can go on with")
    plan.notes += [_told(change) for change in check_resume(old, new)]
    return run(check_training(frozen.command.name, new), plan, quiet=quiet or json_mode)


def _told(change: Change) -> str:
    return f"changed for this resume: {change.key} = {change.new} (was {change.old})"
