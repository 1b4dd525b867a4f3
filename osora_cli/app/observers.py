"""Who is told of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from osora_cli.config.schema import TrainConfig
from osora_cli.report.base import ObserverGroup
from osora_cli.report.console import ConsoleReport, LogFile
from osora_cli.report.eval_pictures import EvalPictures
from osora_cli.report.jsonl import MetricsFile
from osora_cli.report.plateau_watch import PlateauWatch
from osora_cli.report.profile import ProfileTrace
from osora_cli.report.tensorboard import TensorBoardScalars
from osora_cli.report.wandb import WandbReport


def make_observers(config: TrainConfig, command: str, run: Path, *, quiet: bool) -> ObserverGroup:
    """The observers that a config asks for. Raises SetupError where one needs what is not installed."""
    observers: list[Any] = [ConsoleReport(quiet), LogFile(), MetricsFile(), EvalPictures()]
    if config.tensorboard:
        observers.append(TensorBoardScalars())
    if config.wandb:
        observers.append(WandbReport(config.wandb_project))
    if config.profile:
        observers.append(ProfileTrace(config.profile_updates))
    # Last, after the file that it reads the past from; what it has to say goes to all the others.
    watch = PlateauWatch(lambda line: group.on_event("note", line, {}), disc_advice(command, run))
    group = ObserverGroup([*observers, watch])
    return group


def disc_advice(command: str, run: Path) -> str | None:
    """What follows a first stage whose loss is flat; None for other trainings."""
    if command != "train vae":
        return None
    return f"add the discriminator: `osora train vae-disc CONFIG --from-pretrained {run}`"
