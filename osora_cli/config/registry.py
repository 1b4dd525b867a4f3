"""Which schema and which first config each command has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from osora_cli.config.base import Section
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig


@dataclass(frozen=True)
class Command:
    """A command that takes a config. `default` is the preset taken when none is given."""

    name: str
    schema: type[Section]
    default: str
    trains: bool


COMMANDS = {
    command.name: command
    for command in (
        Command("train vae", TrainVaeConfig, "vae/train/video_dc_ae", trains=True),
        Command("train vae-disc", TrainVaeDiscConfig, "vae/train/video_dc_ae_disc", trains=True),
        Command("train diffusion", TrainDiffusionConfig, "diffusion/train/image", trains=True),
        Command("infer reconstruct", ReconstructConfig, "vae/inference/video_dc_ae", trains=False),
    )
}


def command_of(keys: Iterable[str]) -> Command:
    """The training command that a frozen config belongs to, told by its keys: a frozen config holds every field."""
    have = set(keys)
    return min(
        (command for command in COMMANDS.values() if command.trains),
        key=lambda command: len(have ^ set(command.schema.model_fields)),
    )
