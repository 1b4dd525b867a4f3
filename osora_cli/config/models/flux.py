"""The section `model` of an MMDiT, the diffusion transformer over latent tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from osora_cli.config.base import Float, Int, Section
from osora_cli.errors import ConfigError

NUM_AXES = 3  # frame, row and column: the three position ids of a token

Grid = tuple[int, int, int]
Size = Annotated[Int, Field(ge=1)]
Count = Annotated[Int, Field(ge=0)]


class FluxConfig(Section):
    """MMDiT: double-stream blocks over text and image tokens, then single-stream blocks over the joined sequence."""

    type: Literal["flux"] = "flux"
    from_pretrained: str | None = Field(
        None, description="weights to start from: a checkpoint, a run, a file, or hf://org/repo/file"
    )
    strict_load: bool = Field(True, description="missing, unexpected or mis-shaped keys are errors")
    pretrained_rope: Literal["interleaved", "half"] | None = Field(
        None, description="rotary layout of those weights: interleaved (FLUX.1) or half (Open-Sora); null: the model's"
    )
    guidance_embed: bool = Field(False, description="embed the guidance strength beside the timestep (FLUX.1-dev)")
    fused_qkv: bool = Field(True, description="one projection for q, k and v; the released video weights have three")
    use_liger_rope: bool = Field(
        False, description="rotary pairs (k, k + half), as the released video weights; else (2k, 2k + 1), as FLUX.1"
    )
    grad_ckpt_settings: tuple[Count, Count] | None = Field(
        None, description="how many double and single blocks `grad_checkpoint` recomputes; null: all"
    )
    in_channels: Size = Field(..., description="features of a packed token: latent channels x patch_size squared")
    vec_in_dim: Size = Field(..., description="width of the pooled text vector (CLIP-L: 768)")
    context_in_dim: Size = Field(..., description="width of the text tokens (T5-XXL: 4096)")
    hidden_size: Size = Field(..., description="width of the transformer")
    mlp_ratio: Float = Field(4.0, gt=0, description="width of the MLPs in units of hidden_size")
    num_heads: Size = Field(..., description="attention heads; must divide hidden_size")
    depth: Count = Field(..., description="double-stream blocks")
    depth_single_blocks: Count = Field(..., description="single-stream blocks")
    axes_dim: list[Int] = Field(..., description="channels of a head that rotate with frame, row and column")
    theta: Int = Field(10000, ge=1, description="base of the rotary frequencies")
    qkv_bias: bool = Field(True, description="bias in the double blocks' q, k and v projections")
    cond_embed: bool = Field(False, description="add an embedding of the condition (mask and masked latent)")
    patch_size: Size = Field(2, description="edge of the square of latent pixels that makes one token")

    @property
    def rope_layout(self) -> Literal["interleaved", "half"]:
        """Which channels of a head rotate together."""
        return "half" if self.use_liger_rope else "interleaved"

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_dim(self) -> int:
        """Width of the hidden layer of each MLP, rounded down."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def latent_channels(self) -> int:
        """Channels of the latent that packs into tokens of `in_channels` features."""
        return self.in_channels // self.patch_size**2

    @property
    def cond_channels(self) -> int:
        """Features of a packed condition token: the latent's and, for each of its pixels, the mask."""
        return self.in_channels + self.patch_size**2

    @field_validator("mlp_ratio")
    @classmethod
    def _mlp_has_width(cls, value: float, info: ValidationInfo) -> float:
        hidden = info.data.get("hidden_size")
        if hidden is not None and int(hidden * value) < 1:
            raise ValueError(f"`{value}` leaves no channel of hidden_size `{hidden}` for the MLPs")
        return value

    @field_validator("num_heads")
    @classmethod
    def _heads_divide(cls, value: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden_size")
        if hidden is not None and hidden % value:
            raise ValueError(f"`{value}` does not divide hidden_size `{hidden}`")
        return value

    @field_validator("axes_dim")
    @classmethod
    def _axes_fill_a_head(cls, value: list[int], info: ValidationInfo) -> list[int]:
        if len(value) != NUM_AXES:
            raise ValueError(f"`{value}` has {len(value)} entries, {NUM_AXES} are needed: frame, row, column")
        if any(dim < 2 or dim % 2 for dim in value):
            raise ValueError(f"`{value}` must be even numbers of at least 2: channels rotate in pairs")
        hidden, heads = info.data.get("hidden_size"), info.data.get("num_heads")
        if hidden is not None and heads is not None and sum(value) != hidden // heads:
            raise ValueError(
                f"`{value}` add up to {sum(value)}, but a head has {hidden // heads} channels "
                f"(hidden_size {hidden} / num_heads {heads})"
            )
        return value

    @field_validator("patch_size")
    @classmethod
    def _patch_fits_channels(cls, value: int, info: ValidationInfo) -> int:
        channels = info.data.get("in_channels")
        if channels is not None and channels % value**2:
            raise ValueError(
                f"a patch of `{value}` x `{value}` has {value**2} latent pixels, and in_channels `{channels}` is no "
                f"multiple of that"
            )
        return value


def patch_grid(latent_size: tuple[int, int, int], patch_size: int) -> Grid:
    """Tokens along frames, rows and columns of a latent of (T, H, W).

    Raises:
        ConfigError: rows or columns are no multiple of the patch.
    """
    frames, rows, columns = latent_size
    if rows % patch_size or columns % patch_size:
        raise ConfigError(
            f"a latent of `{rows}` x `{columns}` cannot be cut into patches of {patch_size} x {patch_size}",
            allowed=f"rows and columns that are multiples of {patch_size}",
            hint=f"choose clip heights and widths that are multiples of {patch_size} times the autoencoder's ratio",
        )
    return frames, rows // patch_size, columns // patch_size
