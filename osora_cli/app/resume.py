"""Going on with a run: its own config, its newest checkpoint that verifies, the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from osora_cli.app.recipes import check_training
from osora_cli.app.runs import plan_resume
from osora_cli.app.team import shared_plan, team
from osora_cli.app.train import TrainResult, run
from osora_cli.checkpoint.layout import parse_folder_name
from osora_cli.config.freeze import Change, check_resume, thaw
from osora_cli.config.overrides import Override
from osora_cli.config.schema import TrainConfig
from osora_cli.engine.launch import launched
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
    if not launched():
        plan = plan_resume(target)
        command, config, notes = _config(plan.folder, overrides)
        plan.notes += notes
        with team(config) as members:
            return run(check_training(command, config), plan, members, quiet=quiet or json_mode)
    # How ranks find each other is in the config, so that comes first; rank 0 looks for the checkpoint then.
    command, config, notes = _config(_folder(target), overrides)
    with team(config) as members:
        plan = shared_plan(members, lambda: plan_resume(target))
        plan.notes += notes
        return run(check_training(command, config), plan, members, quiet=quiet or json_mode)


def _config(folder: Path, overrides: Sequence[Override]) -> tuple[str, TrainConfig, list[str]]:
    """The run's command, its config with the overrides, and what they change."""
    old = thaw(folder).config
    frozen = thaw(folder, overrides)
    new = frozen.config
    if not isinstance(new, TrainConfig):
        raise UsageError(f"`{folder}` is no run that this osora can go on with")
    return frozen.command.name, new, [_told(change) for change in check_resume(old, new)]


def _folder(target: Path) -> Path:
    """The run that `target` is, or is a checkpoint of."""
    target = target.resolve()
    return target.parent if parse_folder_name(target.name) is not None else target


def _told(change: Change) -> str:
    return f"changed for this resume: {change.key} = {change.new} (was {change.old})"
