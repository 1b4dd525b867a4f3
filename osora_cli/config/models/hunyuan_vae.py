"""The section `model` or `ae` of a HunyuanVideo VAE, and what follows from it without building it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from osora_cli.config.base import Float, Int, Section
from osora_cli.config.models.dc_ae import TileAxis
from osora_cli.errors import ConfigError


class HunyuanVaeConfig(Section):
    """Causal 3-D VAE of HunyuanVideo. The defaults are the released network's."""

    type: Literal["hunyuan_vae"] = "hunyuan_vae"
    from_pretrained: str | None = Field(
        None, description="weights to start from: a checkpoint, a run, a file, or hf://org/repo/file"
    )
    strict_load: bool = Field(True, description="missing, unexpected or mis-shaped keys are errors")
    in_channels: Int = Field(3, ge=1, description="channels of a frame")
    out_channels: Int = Field(3, ge=1, description="channels of a decoded frame")
    latent_channels: Int = Field(16, ge=1, description="channels of the latent")
    block_out_channels: list[Int] = Field([128, 256, 512, 512], min_length=1, description="channels of each block")
    layers_per_block: Int = Field(2, ge=1, description="resnets in an encoder block; the decoder has one more")
    norm_num_groups: Int = Field(32, ge=1, description="groups of every group norm")
    act_fn: Literal["silu"] = Field("silu", description="activation (the only kind)")
    mid_block_add_attention: bool = Field(True, description="attention between the two resnets of the middle block")
    dropout: Float = Field(0.0, ge=0, lt=1, description="share of activations dropped inside resnets")
    time_compression_ratio: Literal[4, 8] = Field(4, description="frames per latent frame, after the first")
    spatial_compression_ratio: Literal[8] = Field(8, description="pixels per latent pixel")
    scale_factor: Float = Field(0.476986, gt=0, description="latents are multiplied by it on encode, after the shift")
    shift_factor: Float = Field(0.0, description="subtracted from latents on encode")
    use_slicing: bool = Field(False, description="encode and decode one sample at a time")
    use_spatial_tiling: bool = Field(False, description="encode and decode large frames in tiles")
    use_temporal_tiling: bool = Field(False, description="encode and decode long clips in tiles")
    sample_size: Int = Field(256, ge=1, description="tile edge in pixels")
    sample_tsize: Int = Field(64, ge=1, description="tile length in frames, after its first")
    tile_overlap_factor: Float = Field(
        0.25, ge=0, lt=1, description="share of a tile that overlaps its neighbour, rounded down to whole latents"
    )


def compression(config: HunyuanVaeConfig) -> tuple[int, int]:
    """Frames (after the first) and pixels per latent."""
    return config.time_compression_ratio, config.spatial_compression_ratio


def strides(config: HunyuanVaeConfig) -> list[tuple[int, int, int]]:
    """Step along (T, H, W) after each block; (1, 1, 1): none. The decoder enlarges by the same list.

    Raises:
        ConfigError: too few blocks for the compression, or channels that the groups do not divide.
    """
    blocks, time, space = len(config.block_out_channels), *compression(config)
    in_space, in_time = space.bit_length() - 1, time.bit_length() - 1
    faults = [
        f"model.block_out_channels has `{width}`, which model.norm_num_groups `{config.norm_num_groups}` do not divide"
        for width in config.block_out_channels
        if width % config.norm_num_groups
    ]
    if blocks <= in_space:
        faults.append(f"model.block_out_channels has `{blocks}` blocks, {space} px a latent need {in_space + 1}")
    if faults:
        raise ConfigError("\n".join(faults), where="model")
    # A ratio of 4 is reached in the blocks just before the last one, a ratio of 8 along with space.
    first = 0 if time == 8 else blocks - 1 - in_time
    halves_time = range(first, first + in_time)
    return [(2 if i in halves_time else 1, *(2 if i < in_space else 1,) * 2) for i in range(blocks)]


def latent_size(config: HunyuanVaeConfig, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Latent frames, rows and columns of a clip of any size."""
    time, space = compression(config)
    return (frames - 1) // time + 1, (height - 1) // space + 1, (width - 1) // space + 1


def check_clip(config: HunyuanVaeConfig, frames: int, height: int, width: int) -> None:
    """A clip that comes back in its own size: frames one more than a multiple of the ratio, whole latents in space.

    Raises:
        ConfigError: naming all that does not fit.
    """
    time, space = compression(config)
    faults = []
    if frames < 1 or (frames - 1) % time:
        faults.append(f"clips of `{frames}` frames come back longer or shorter: the first frame is a latent of its own")
    if height < 1 or width < 1 or height % space or width % space:
        faults.append(f"frames of `{height}x{width}` px are not whole latents of {space} px")
    if faults:
        near = max(0, (frames - 1) // time) * time + 1
        raise ConfigError(
            "\n".join(faults),
            allowed=f"1 + a multiple of {time} frames; sides that are multiples of {space} px",
            hint=f"take {near} or {near + time} frames, or a bucket of another size",
        )


def tile_axes(config: HunyuanVaeConfig) -> tuple[TileAxis | None, TileAxis | None]:
    """The tiles in time (each has one more frame, its first) and in space, None where that tiling is off.

    The latent tile follows from the sample tile, and all lengths from whole latents, so that tiles line up.

    Raises:
        ConfigError: a tile that is not whole latents.
    """
    time, space = compression(config)
    axes: list[TileAxis | None] = []
    for on, name, unit, size, ratio in (
        (config.use_temporal_tiling, "sample_tsize", "frames", config.sample_tsize, time),
        (config.use_spatial_tiling, "sample_size", "px", config.sample_size, space),
    ):
        if on and size % ratio:
            raise ConfigError(
                f"model.{name} `{size}` {unit} is not a whole number of latents",
                allowed=f"multiples of {ratio} {unit}",
                hint=f"--model.{name.replace('_', '-')} {(size // ratio + 1) * ratio}",
            )
        latent = size // ratio
        axes.append(TileAxis(latent, int(latent * config.tile_overlap_factor), ratio) if on else None)
    return axes[0], axes[1]
