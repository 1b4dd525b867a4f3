"""The section of the perceptual distance."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from osora_cli.config.base import Section


class LpipsConfig(Section):
    """LPIPS with VGG16, frozen."""

    type: Literal["LPIPS"] = "LPIPS"
    from_pretrained: str | None = Field(
        None, description="file of the weights; null: as `osora weights fetch lpips-vgg` puts it"
    )
