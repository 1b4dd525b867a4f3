"""The section `model` of a Video DC-AE, and what follows from it without building the model.

The architecture is that of DC-AE (Chen et al. 2024, arXiv:2410.10733) carried to video by Open-Sora 2.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal

from pydantic import Field

from osora_cli.config.base import Float, Int, Section
from osora_cli.errors import ConfigError

BlockType = Literal["ResBlock", "EViT_GLU", "EViTS5_GLU"]
Activation = Literal["silu", "relu"]

# Channels of one head of the linear attention; widths of EViT stages are multiples of it.
HEAD_CHANNELS = 32


class DcAeEncoderConfig(Section):
    """Encoder of a free Video DC-AE; one entry a stage in each list."""

    block_type: BlockType | list[BlockType] = Field("ResBlock", description="block of each stage, or one for all")
    width_list: list[Int] = Field(..., description="channels of each stage")
    depth_list: list[Int] = Field(..., description="blocks in each stage")
    temporal_downsample: list[bool] = Field(..., description="which stages end by halving time as well as space")
    downsample_block_type: Literal["Conv"] = Field("Conv", description="strided convolution with averaging shortcut")
    norm: Literal["rms3d"] = Field("rms3d", description="norm inside blocks")
    act: Activation = Field("silu", description="activation inside blocks")
    is_video: Literal[True] = Field(True, description="3-D convolutions (the only kind)")


class DcAeDecoderConfig(Section):
    """Decoder of a free Video DC-AE; lists in the encoder's order (stage 0 is the largest)."""

    block_type: BlockType | list[BlockType] = Field("ResBlock", description="block of each stage, or one for all")
    width_list: list[Int] = Field(..., description="channels of each stage")
    depth_list: list[Int] = Field(..., description="blocks in each stage")
    temporal_upsample: list[bool] = Field(..., description="which stages begin by doubling time as well as space")
    upsample_block_type: Literal["InterpolateConv"] = Field("InterpolateConv", description="nearest, then convolution")
    norm: Literal["rms3d"] = Field("rms3d", description="norm inside blocks")
    act: Activation = Field("silu", description="activation inside blocks")
    out_norm: Literal["rms3d"] = Field("rms3d", description="norm before the last convolution")
    out_act: Activation = Field("relu", description="activation before the last convolution")
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
    is_training: bool = Field(False, description="Open-Sora's key: raw latents, `scaling_factor` left out")
    use_spatial_tiling: bool = Field(False, description="encode and decode large frames in tiles")
    use_temporal_tiling: bool = Field(False, description="encode and decode long clips in tiles")
    spatial_tile_size: Int = Field(256, ge=1, description="tile edge in pixels")
    temporal_tile_size: Int = Field(32, ge=1, description="tile length in frames")
    tile_overlap_factor: Float = Field(0.25, ge=0, lt=1, description="share of a tile that overlaps its neighbour")
    disc_off_grad_ckpt: bool = Field(
        False, description="the decoder's last layer without checkpointing, for the adaptive weight"
    )


# ---- what follows from a config without building the model ------------------------------------------------------


@dataclass(frozen=True)
class CoderPlan:
    """Encoder or decoder as it is built: one entry a stage, stage 0 the largest.

    `temporal[s]` tells whether the step between stage s and s+1 changes time as well as space; the last is False.
    """

    blocks: tuple[BlockType, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    temporal: tuple[bool, ...]
    act: Activation
    out_act: Activation = "relu"


@dataclass(frozen=True)
class DcAePlan:
    """A consistent architecture: what `plan` makes of a config."""

    in_channels: int
    latent_channels: int
    encoder: CoderPlan
    decoder: CoderPlan
    time_compression: int
    spatial_compression: int


@dataclass(frozen=True)
class TileAxis:
    """How one kind of axis is cut, in latent units; a latent unit is `ratio` pixels or frames."""

    latent: int
    overlap: int
    ratio: int

    @property
    def stride(self) -> int:
        """Latent units from the start of one tile to the start of the next."""
        return self.latent - self.overlap


def plan(config: DcAeConfig) -> DcAePlan:
    """The architecture that a config names, checked.

    Raises:
        ConfigError: no architecture is named, or list lengths, widths, latent channels or stated compression ratios
            do not fit together. All faults are listed.
    """
    encoder, decoder, latent, faults = _sections(config)
    if encoder is None or decoder is None:
        raise ConfigError(
            "\n".join(faults),
            where="model",
            allowed=f"`model_name` one of {', '.join(sorted(_KNOWN))}; or `encoder`, `decoder` and `latent_channels`",
        )
    if faults:
        raise ConfigError("\n".join(faults), where="model")
    assert latent is not None
    enc = _coder_plan(encoder, encoder.temporal_downsample, "relu", "encoder", "temporal_downsample", faults)
    dec = _coder_plan(decoder, decoder.temporal_upsample, decoder.out_act, "decoder", "temporal_upsample", faults)
    if not faults:
        faults += _pair_faults(enc, dec, latent)
    time, space = 2 ** sum(enc.temporal), 2 ** (len(enc.widths) - 1)
    for name, stated, real in (
        ("time_compression_ratio", config.time_compression_ratio, time),
        ("spatial_compression_ratio", config.spatial_compression_ratio, space),
    ):
        if stated is not None and stated != real and not faults:
            faults.append(f"model.{name} is `{stated}`, the stages give {real}")
    if faults:
        raise ConfigError("\n".join(faults), where="model")
    return DcAePlan(config.in_channels, latent, enc, dec, time, space)


def compression(config: DcAeConfig) -> tuple[int, int]:
    """Frames per latent frame and pixels per latent pixel, (time, space)."""
    made = plan(config)
    return made.time_compression, made.spatial_compression


def latent_channels(config: DcAeConfig) -> int:
    """Channels of the latent."""
    return plan(config).latent_channels


def check_clip(config: DcAeConfig, frames: int, height: int, width: int) -> None:
    """Whether the net gives back clips of this size in the size they came.

    A clip has one frame (an image) or, where time is compressed by k, a multiple of k and at least 2k frames: a single
    latent frame is always decoded as an image. Height and width are multiples of the spatial compression.

    Raises:
        ConfigError: naming the nearest sizes that do.
    """
    time, space = compression(config)
    check_size(frames, height, width, time=time, space=space)


def check_size(frames: int, height: int, width: int, *, time: int, space: int) -> None:
    """`check_clip` for compression ratios that are known already."""
    faults, cures = [], []
    if frames < 1 or (frames > 1 and time > 1 and (frames % time or frames < 2 * time)):
        low = max(2 * time, frames // time * time)
        near = sorted({1, low} if frames < 2 * time else {low, low + time})
        faults.append(f"a clip of `{frames}` frames does not come back as {frames} frames")
        cures.append(f"frames {' or '.join(str(n) for n in near)}")
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % space:
            low = size // space * space
            faults.append(f"{name} `{size}` px is no multiple of {space} px")
            cures.append(f"{name} {f'{low} or ' if low else ''}{low + space} px")
    if faults:
        rule = f"1 frame, or a multiple of {time} from {2 * time} on; " if time > 1 else ""
        raise ConfigError(
            "; ".join(faults),
            where="model: what the autoencoder takes",
            allowed=f"{rule}height and width multiples of {space} px",
            hint=f"nearest: {', '.join(cures)}",
        )


def tile_axes(config: DcAeConfig) -> tuple[TileAxis | None, TileAxis | None]:
    """The tiles in time and in space, None where that tiling is off.

    The latent tile follows from the sample tile. Tile and overlap have to be whole latents, and where time is
    compressed a temporal tile holds at least two of them (a single one is decoded as an image).

    Raises:
        ConfigError: naming overlaps or sizes that fit.
    """
    time, space = compression(config)
    axes: list[TileAxis | None] = []
    for on, name, unit, size, ratio, least in (
        (config.use_temporal_tiling, "temporal_tile_size", "frames", config.temporal_tile_size, time, min(time, 2)),
        (config.use_spatial_tiling, "spatial_tile_size", "px", config.spatial_tile_size, space, 1),
    ):
        axes.append(_tile_axis(name, unit, size, ratio, least, config.tile_overlap_factor) if on else None)
    return axes[0], axes[1]


def _tile_axis(name: str, unit: str, size: int, ratio: int, least: int, share: float) -> TileAxis:
    latent = size // ratio
    if size % ratio or latent < least:
        above = max(least, latent + 1) * ratio
        raise ConfigError(
            f"model.{name} `{size}` {unit} is not {'a whole number of' if size % ratio else 'enough'} latents",
            allowed=f"multiples of {ratio} {unit}" + (f", from {least * ratio} on" if least > 1 else ""),
            hint=f"--model.{name.replace('_', '-')} {above}",
        )
    overlap = round(latent * share)
    if abs(overlap - latent * share) > 1e-6:
        shares = [k / latent for k in range(latent)]
        near = sorted(sorted(shares, key=lambda s: abs(s - share))[:2])
        raise ConfigError(
            f"model.tile_overlap_factor `{share}` of a tile of {size} {unit} is {latent * share:g} latents",
            allowed=f"shares of a tile that give whole latents: k/{latent}, k from 0 to {latent - 1}",
            hint=f"--model.tile-overlap-factor {' or '.join(f'{s:.6g}' for s in near)}, or another {name}",
        )
    return TileAxis(latent, overlap, ratio)


def _sections(
    config: DcAeConfig,
) -> tuple[DcAeEncoderConfig | None, DcAeDecoderConfig | None, int | None, list[str]]:
    """Encoder, decoder and latent channels of a known or free architecture, with what is wrong so far."""
    faults: list[str] = []
    if config.model_name is None:
        missing = [n for n in ("encoder", "decoder", "latent_channels") if getattr(config, n) is None]
        if len(missing) == 3:
            faults.append("the model names no architecture: `model_name`, `encoder` and `decoder` are not set")
        elif missing:
            faults.append(f"a free architecture needs {' and '.join(f'`model.{n}`' for n in missing)} as well")
        if config.in_channels < 1:
            faults.append(f"model.in_channels is `{config.in_channels}`, at least 1 is needed")
        return config.encoder, config.decoder, config.latent_channels, faults
    known = _KNOWN.get(config.model_name)
    if known is None:
        near = get_close_matches(config.model_name, _KNOWN, n=1, cutoff=0)[0]
        return None, None, None, [f"unknown model_name `{config.model_name}`, the nearest is `{near}`"]
    for name, fixed in (("in_channels", 3), ("latent_channels", known[2])):
        if getattr(config, name) not in (None, fixed):
            faults.append(f"model.{name} is `{getattr(config, name)}`, {config.model_name} has {fixed}")
    faults += [
        f"model.{name} and model.model_name are both set, one names the architecture"
        for name in ("encoder", "decoder")
        if getattr(config, name) is not None
    ]
    return known[0], known[1], known[2], faults


def _coder_plan(
    section: DcAeEncoderConfig | DcAeDecoderConfig,
    flags: list[bool],
    out_act: Activation,
    name: str,
    flag_name: str,
    faults: list[str],
) -> CoderPlan:
    """The stages of one side; what is wrong with them goes to `faults`."""
    count = len(section.width_list)
    temporal = flags or [False] * count
    blocks = [section.block_type] * count if isinstance(section.block_type, str) else section.block_type
    for key, length in (
        ("depth_list", len(section.depth_list)),
        ("block_type", len(blocks)),
        (flag_name, len(temporal)),
    ):
        if length != count:
            faults.append(f"model.{name}.{key} has {length} entries, model.{name}.width_list has {count}")
    if not count:
        faults.append(f"model.{name}.width_list is empty, at least one stage is needed")
    if len(temporal) == count and temporal[-1:] == [True]:
        faults.append(f"model.{name}.{flag_name} ends with `true`, no step follows the last stage")
    for key, values in (("width_list", section.width_list), ("depth_list", section.depth_list)):
        faults += [f"model.{name}.{key}[{i}] is `{v}`, at least 1 is needed" for i, v in enumerate(values) if v < 1]
    for i, (block, width) in enumerate(zip(blocks, section.width_list, strict=False)):
        if block != "ResBlock" and width % HEAD_CHANNELS:
            faults.append(f"model.{name}.width_list[{i}] is `{width}`, {block} needs a multiple of {HEAD_CHANNELS}")
    for i, (narrow, wide) in enumerate(pairwise(section.width_list)):
        # The shortcut folds a 2x2 block into channels on the way down, and unfolds it on the way up.
        if wide > 0 and narrow > 0 and (4 * narrow) % wide:
            faults.append(f"model.{name}.width_list[{i + 1}] is `{wide}`, it has to divide 4 x {narrow} (the shortcut)")
    return CoderPlan(
        tuple(blocks), tuple(section.width_list), tuple(section.depth_list), tuple(temporal), section.act, out_act
    )


def _pair_faults(enc: CoderPlan, dec: CoderPlan, latent: int) -> list[str]:
    """What does not fit between encoder, decoder and latent."""
    faults = []
    if len(enc.widths) != len(dec.widths):
        faults.append(f"model.encoder has {len(enc.widths)} stages, model.decoder {len(dec.widths)}: equal numbers fit")
    if sum(enc.temporal) != sum(dec.temporal):
        faults.append(
            f"model.encoder halves time {sum(enc.temporal)} times, model.decoder doubles it {sum(dec.temporal)} times"
        )
    if latent < 1:
        faults.append(f"model.latent_channels is `{latent}`, at least 1 is needed")
        return faults
    faults += [
        f"model.latent_channels `{latent}` does not divide the last width of model.{name}, `{coder.widths[-1]}` "
        "(the shortcut)"
        for name, coder in (("encoder", enc), ("decoder", dec))
        if coder.widths[-1] % latent
    ]
    return faults


def _f32t4c128() -> tuple[DcAeEncoderConfig, DcAeDecoderConfig, int]:
    widths = [128, 256, 512, 512, 1024, 1024]
    blocks: list[BlockType] = ["ResBlock"] * 3 + ["EViTS5_GLU"] * 3  # type: ignore[assignment]
    temporal = [False, False, False, True, True, False]
    return (
        DcAeEncoderConfig(
            block_type=blocks, width_list=widths, depth_list=[2, 2, 2, 3, 3, 3], temporal_downsample=temporal
        ),
        DcAeDecoderConfig(block_type=blocks, width_list=widths, depth_list=[3] * 6, temporal_upsample=temporal),
        128,
    )


_KNOWN = {"dc-ae-f32t4c128": _f32t4c128()}
