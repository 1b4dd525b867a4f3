"""Which training each command is."""

from __future__ import annotations

from typing import cast

from osora_cli.app.diffusion.train import DiffusionTraining
from osora_cli.app.training import Training
from osora_cli.app.vae.train import VaeTraining
from osora_cli.app.vae.train_disc import VaeDiscTraining
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.schema import TrainConfig, TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig


def check_training(command: str, config: TrainConfig) -> Training:
    """The training that `command` means, its input checked. Raises OsoraError of the kind that fits."""
    if command == "train vae":
        return VaeTraining(cast("TrainVaeConfig", config))
    if command == "train vae-disc":
        return VaeDiscTraining(cast("TrainVaeDiscConfig", config))
    if command == "train diffusion":
        return DiffusionTraining(cast("TrainDiffusionConfig", config))
    raise ValueError(f"`{command}` is no training")
