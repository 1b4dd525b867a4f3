"""The section `model` of a Video DC-AE (models.md 1)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from osora_cli.config.base import Float, Int, Section

BlockType = Literal["ResBlock", "EViT_GLU", "EViTS5_GLU"]


class DcAeEncoderConfig(Section):
    """Encoder of a free Video DC-AE; one entry a stage in each list."""

    block_type: BlockType | list[BlockType] = Field("ResBlock", description="block of each stage, or one for all")
    width_list: list[Int] = Field(..., description="channels of each stage")
    depth_list: list[Int] = Field(..., description="blocks in each stage")
    temporal_downsample: list[bool] = Field(..., description="which stages end by halving time as well as space")
    downsample_block_type: Literal["Conv"] = Field("Conv", description="strided convolution with averaging shortcut")
    norm: Literal["rms3d"] = Field("rms3d", description="norm inside blocks")
    act: Literal["silu", "relu"] = Field("silu", description="activation inside blocks")
    is_video: Literal[True] = Field(True, description="3-D convolutions (the only kind)")


class DcAeDecoderConfig(Section):
    """Decoder of a free Video DC-AE; lists in the encoder's order (stage 0 is the largest)."""

    block_type: BlockType | list[BlockType] = Field("ResBlock", description="block of each stage, or one for all")
    width_list: list[Int] = Field(..., description="channels of each stage")
    depth_list: list[Int] = Field(..., description="blocks in each stage")
    temporal_upsample: list[bool] = Field(..., description="which stages begin by doubling time as well as space")
    upsample_block_type: Literal["InterpolateConv"] = Field("InterpolateConv", description="nearest, then convolution")
    norm: Literal["rms3d"] = Field("rms3d", description="norm inside blocks")
    act: Literal["silu", "relu"] = Field("silu", description="activation inside blocks")
    out_norm: Literal["rms3d"] = Field("rms3d", description="norm before the last convolution")
    out_act: Literal["relu", "silu"] = Field("relu", description="activation before the last convolution")
    is_video: Literal[True] = Field(True, description="3-D convolutions (the only kind)")


class DcAeConfig(Section):
    """Video DC-AE: `model_name` for a known one, or `encoder` and `decoder` for a free one."""

    type: Literal["dc_ae"] = "dc_ae"
    model_name: str | None = Field(None, description="a known architecture: dc-ae-f32t4c128")
    from_scratch: bool = Field(True, description="start from the random initialisation, or from `from_pretrained`")
    from_pretrained: str | None = Field(
        None, description="weights to start from: a checkpoint, a run, a file, or hf://org/repo/file"
    )
    strict_load: bool = Field(True, description="missing, unexpected or mis-shaped keys are errors")
    in_channels: Int = Field(3, description="channels of a frame")
    latent_channels: Int | None = Field(None, description="channels of the latent; set by `model_name` or here")
    time_compression_ratio: Int | None = Field(None, description="frames per latent frame; follows from the stages")
    spatial_compression_ratio: Int | None = Field(None, description="pixels per latent pixel; follows from the stages")
    encoder: DcAeEncoderConfig | None = Field(None, description="a free encoder")
    decoder: DcAeDecoderConfig | None = Field(None, description="a free decoder")
    scaling_factor: Float | None = Field(
        None, description="latents are divided by it on encode and multiplied on decode (the latents' std)"
    )
    is_training: bool = Field(False, description="the seed's key: raw latents, `scaling_factor` left out")
    use_spatial_tiling: bool = Field(False, description="encode and decode large frames in tiles")
    use_temporal_tiling: bool = Field(False, description="encode and decode long clips in tiles")
    spatial_tile_size: Int = Field(256, ge=1, description="tile edge in pixels")
    temporal_tile_size: Int = Field(32, ge=1, description="tile length in frames")
    tile_overlap_factor: Float = Field(0.25, ge=0, lt=1, description="share of a tile that overlaps its neighbour")
    disc_off_grad_ckpt: bool = Field(
        False, description="the decoder's last layer without checkpointing, for the adaptive weight"
    )
