"""The section `discriminator` and those of the adversarial losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from osora_cli.config.base import Float, Int, Section


class DiscriminatorConfig(Section):
    """The 3-D patch discriminator of the autoencoder's second stage."""

    type: Literal["N_Layer_discriminator_3D"] = "N_Layer_discriminator_3D"
    from_pretrained: str | None = Field(
        None, description="weights to start from: a checkpoint, a file, or hf://org/repo/file"
    )
    strict_load: bool = Field(True, description="missing, unexpected or mis-shaped keys are errors")
    input_nc: Int = Field(3, ge=1, description="channels of a frame")
    ndf: Int = Field(64, ge=1, description="channels of the first level; doubled a level, up to 8 times")
    n_layers: Int = Field(5, ge=1, description="levels that halve the frame")
    use_actnorm: Literal[False] = Field(False, description="batch norm (the only kind)")
    dropout: Float = Field(0.3, ge=0, lt=1, description="share of activations dropped after each normed level")
    conv_cls: Literal["conv3d"] = Field("conv3d", description="plain 3-D convolutions (the only kind)")


class DiscLossConfig(Section):
    """The discriminator's own loss."""

    disc_start: Int = Field(2001, ge=0, description="update from which the discriminator is trained, counted from 1")
    disc_factor: Float | None = Field(1.0, ge=0, description="factor on the loss; 0 or null: off")
    disc_loss_type: Literal["hinge", "vanilla", "wgan-gp"] = Field("hinge", description="kind of loss")


class GenLossConfig(Section):
    """The adversarial term of the autoencoder."""

    gen_start: Int = Field(2001, ge=0, description="update from which the term counts, counted from 1")
    disc_factor: Float | None = Field(1.0, ge=0, description="factor on the term; 0 or null: off")
    disc_weight: Float = Field(
        0.5, ge=0, description="size of the adversarial gradient at the last layer against the reconstruction's"
    )
    max_ratio: Float = Field(
        1e4, gt=0, description="the ratio of the two gradients' norms, which disc_weight is multiplied by, at most"
    )
    gen_ramp: Int = Field(0, ge=0, description="updates over which the term grows to its full size; 0: at once")
    weight_per_rank: bool = Field(
        False, description="each rank weighs the term by its own gradients, as Open-Sora; else by the ranks' mean"
    )
