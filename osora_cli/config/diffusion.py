"""What a config of `osora train diffusion` holds, with Open-Sora's own key names, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from osora_cli.config.base import Float, Int, Section
from osora_cli.config.models.autoencoder import AutoencoderSection, compression, is_causal, latent_channels
from osora_cli.config.models.flux import Count, FluxConfig
from osora_cli.config.models.text import TextEmbedderConfig
from osora_cli.config.sampling import SamplingOption
from osora_cli.config.schema import TrainConfig
from osora_cli.errors import ConfigError

ConditionType = Literal[
    "t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy", "v2v_tail_easy"
]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _word(value: Any) -> Any:
    """YAML reads `true` as a truth value, and some write `True`."""
    return str(value).lower() if isinstance(value, (bool, str)) else value


Switch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_word)]


class DropoutConfig(Section):
    """How often a text is left out, each embedder's by a draw of its own."""

    t5: Float = Field(0.0, ge=0, le=1, description="share of samples whose text tokens are those of the empty text")
    clip: Float = Field(0.0, ge=0, le=1, description="share of samples whose pooled vector is that of the empty text")


class TrainDiffusionConfig(TrainConfig):
    """`osora train diffusion`."""

    model: FluxConfig = Field(..., description="the diffusion transformer")
    ae: AutoencoderSection = Field(..., description="the frozen autoencoder, hunyuan_vae or dc_ae")
    ae_use_ema: bool = Field(True, description="of an own autoencoder's checkpoint, take the averaged weights")
    ae_batch_size: Int | None = Field(None, ge=1, description="clips encoded at a time; null: the whole batch")
    compile_ae: bool = Field(False, description="compile the autoencoder's encoder")
    warmup_ae: bool = Field(
        False, description="encode a clip of each bucket's size before training, so that kernels are chosen by then"
    )
    is_causal_vae: bool | None = Field(None, description="Open-Sora's key; null: as the autoencoder is")
    ae_spatial_compression: Int | None = Field(
        None, ge=1, description="heights and widths of buckets are multiples of it; null: autoencoder times patch"
    )
    t5: TextEmbedderConfig = Field(..., description="embedder of the text tokens")
    clip: TextEmbedderConfig = Field(..., description="embedder of the pooled text vector")
    dropout_ratio: DropoutConfig = Field(default_factory=DropoutConfig, description="how often texts are left out")
    condition_config: dict[ConditionType, Weight] | None = Field(
        None, description="weights of the kinds of visual condition, for a model with cond_embed; null: text only"
    )
    no_i2v_ref_loss: bool = Field(False, description="leave the frames that the condition shows out of the loss")
    sigma_min: Float = Field(1e-5, ge=0, lt=1, description="share of noise that is left at time 0")
    guidance: Float = Field(4.0, ge=0, description="guidance strength told to a model with guidance_embed")
    patch_size: Int | None = Field(None, ge=1, description="Open-Sora's key; null: model.patch_size")

    eps: Float | None = Field(None, gt=0, description="wins over optim.eps")
    compile: Switch = Field(
        "false",
        description="compile the MMDiT's blocks, for each bucket's shape before the first update; auto: on a GPU only; "
        "where it cannot be, they run as they are and the log says why",
    )
    grad_ckpt_settings: tuple[Count, Count] | None = Field(
        None, description="double and single blocks that are recomputed, where model.grad_ckpt_settings is null"
    )
    grad_ckpt_buffer_size: Int = Field(
        0, ge=0, description="bytes of host memory that recomputed blocks keep their inputs in; 0: they stay on the GPU"
    )
    load_master_weights: bool = Field(True, description="on resume, take the fp32 weights that a checkpoint holds")

    cached_video: bool = Field(False, description="take latents from the cache that `osora data cache` has made")
    cached_text: bool = Field(False, description="take text embeddings from that cache")
    cache_dir: str | None = Field(None, description="the cache's folder; null: TABLE.cache beside TABLE.csv")
    cache_windows: Int = Field(
        1, ge=1, description="windows of each clip in the cache; epoch after epoch takes the next of them"
    )
    sampling_option: SamplingOption = Field(
        default_factory=SamplingOption, description="how `eval` samples the clips that it shows"
    )


def check_parts(config: TrainDiffusionConfig) -> None:
    """Whether autoencoder, model, texts and conditions fit together.

    Raises:
        ConfigError: with everything that does not fit.
    """
    model, ae = config.model, config.ae
    features = latent_channels(ae) * model.patch_size**2
    faults = []
    if model.in_channels != features:
        faults.append(
            f"`model.in_channels` is `{model.in_channels}`, and {latent_channels(ae)} latent channels in patches of "
            f"{model.patch_size} x {model.patch_size} make {features}"
        )
    if config.patch_size not in (None, model.patch_size):
        faults.append(f"`patch_size` is `{config.patch_size}` and `model.patch_size` is `{model.patch_size}`")
    if config.is_causal_vae not in (None, is_causal(ae)):
        faults.append(f"`is_causal_vae` is `{str(config.is_causal_vae).lower()}`, which {ae.type} is not")
    for name, text, width, wanted in (
        ("t5", config.t5, "context_in_dim", model.context_in_dim),
        ("clip", config.clip, "vec_in_dim", model.vec_in_dim),
    ):
        if text.width not in (None, wanted):
            faults.append(f"`{name}.width` is `{text.width}` and `model.{width}` is `{wanted}`")
    patch = compression(ae)[1] * model.patch_size
    if (config.ae_spatial_compression or patch) % patch:
        faults.append(
            f"`ae_spatial_compression` is `{config.ae_spatial_compression}`, and a patch of the model is {patch} px"
        )
    if config.condition_config is not None:
        if not model.cond_embed:
            faults.append("`condition_config` is given, and `model.cond_embed` is false: the model would not see it")
        if not any(config.condition_config.values()):
            faults.append("`condition_config` gives no kind a weight above 0")
    elif model.cond_embed:
        faults.append("`model.cond_embed` is true and no `condition_config` is given; `{t2v: 1}` is for text alone")
    if config.no_i2v_ref_loss and config.condition_config is None:
        faults.append("`no_i2v_ref_loss` leaves out what conditions show, and no `condition_config` is given")
    if faults:
        raise ConfigError("\n".join(faults))
