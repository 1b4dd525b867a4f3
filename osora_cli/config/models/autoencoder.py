"""The section of an autoencoder of any kind, told apart by `type`, and what both kinds answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from osora_cli.config.models import dc_ae, hunyuan_vae
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig

_DEFAULT = "dc_ae"


def _kind(value: Any) -> Any:
    return value.get("type", _DEFAULT) if isinstance(value, Mapping) else getattr(value, "type", _DEFAULT)


Autoencoder = DcAeConfig | HunyuanVaeConfig
# For fields of a schema. Without `type` it is a Video DC-AE.
AutoencoderSection = Annotated[
    Annotated[DcAeConfig, Tag("dc_ae")] | Annotated[HunyuanVaeConfig, Tag("hunyuan_vae")], Discriminator(_kind)
]


def compression(config: Autoencoder) -> tuple[int, int]:
    """Frames and pixels per latent, (time, space); of a causal autoencoder, frames after the first."""
    return hunyuan_vae.compression(config) if isinstance(config, HunyuanVaeConfig) else dc_ae.compression(config)


def is_causal(config: Autoencoder) -> bool:
    """Whether the first frame has a latent of its own, so that clips of 1 + k * time frames fit."""
    return isinstance(config, HunyuanVaeConfig)


def latent_channels(config: Autoencoder) -> int:
    """Channels of the latents."""
    return config.latent_channels if isinstance(config, HunyuanVaeConfig) else dc_ae.latent_channels(config)


def tile_names(config: Autoencoder) -> tuple[str, str]:
    """The keys that hold the edge of a tile in pixels and its length in frames."""
    if isinstance(config, HunyuanVaeConfig):
        return "sample_size", "sample_tsize"
    return "spatial_tile_size", "temporal_tile_size"


def check(config: Autoencoder) -> None:
    """Whether the section describes a network, tiles included. Raises ConfigError."""
    if isinstance(config, HunyuanVaeConfig):
        hunyuan_vae.strides(config)
        hunyuan_vae.tile_axes(config)
    else:
        dc_ae.plan(config)
        dc_ae.tile_axes(config)
