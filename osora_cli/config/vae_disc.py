"""What a config of `osora train vae-disc` holds beyond that of the first stage. Key names as in Open-Sora."""

from __future__ import annotations

from pydantic import Field

from osora_cli.config.models.discriminator import DiscLossConfig, DiscriminatorConfig, GenLossConfig
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.sections import LrSchedulerConfig, OptimConfig


class TrainVaeDiscConfig(TrainVaeConfig):
    """`osora train vae-disc`."""

    discriminator: DiscriminatorConfig = Field(
        default_factory=DiscriminatorConfig, description="the network that tells clips from their reconstructions"
    )
    optim_discriminator: OptimConfig = Field(default_factory=OptimConfig, description="the discriminator's optimizer")
    disc_lr_scheduler: LrSchedulerConfig = Field(
        default_factory=LrSchedulerConfig, description="the discriminator's learning rate over the run"
    )
    gen_loss_config: GenLossConfig = Field(
        default_factory=GenLossConfig, description="the adversarial term of the autoencoder"
    )
    disc_loss_config: DiscLossConfig = Field(default_factory=DiscLossConfig, description="the discriminator's own loss")
    restart_disc: bool = Field(
        False, description="with --load: leave the checkpoint's discriminator out, a fresh one takes its place"
    )
