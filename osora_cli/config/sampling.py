"""The section `sampling_option`: how clips are sampled from a diffusion model, with Open-Sora's key names."""

from __future__ import annotations

from pydantic import Field

from osora_cli.config.base import Float, Int, Section


class SamplingOption(Section):
    """Euler steps and guidance. Defaults are Open-Sora's but for the number of steps."""

    num_steps: Int = Field(20, ge=1, description="Euler steps; 50 for what is shown to others")
    guidance: Float = Field(7.5, ge=0, description="strength of the text; 1: none")
    guidance_img: Float | None = Field(
        3.0, ge=0, description="strength of the image that is given; null: guided together with the text"
    )
    text_osci: bool = Field(True, description="after step 10, every other step goes without the text's guidance")
    image_osci: bool = Field(True, description="the same for the image's")
    scale_temporal_osci: bool = Field(
        True, description="the image's strength rises over the frames from 1, and falls over the steps"
    )
    shift: bool = Field(True, description="move the times towards noise, the more the larger the latent")
    flow_shift: Float | None = Field(None, gt=0, description="how much; null: by the latent's size")
    seed: Int = Field(42, ge=0, description="of the noise that samples begin from")
