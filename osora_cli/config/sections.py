"""Config sections that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from osora_cli.config.base import Float, Int, Section

Dtype = Literal["fp32", "bf16"]


def _frames(value: object) -> object:
    """JSON and the command line write frame counts as strings: `{"32": [1.0, 1]}`."""
    if isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.lstrip("-").isdigit() else k: v for k, v in value.items()}
    return value


Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[Float, Field(ge=0, lt=1)]
# {frames: (probability, batch size)} or {frames: ((size probability, length probability), batch size)}
Lengths = Annotated[
    dict[
        Annotated[int, Field(ge=1)], tuple[Probability | tuple[Probability, Probability], Annotated[int, Field(ge=1)]]
    ],
    BeforeValidator(_frames),
]
BucketConfig = dict[str, Lengths]


def _null_is_none(value: object) -> object:
    """Open-Sora writes `plugin = None` for no plugin."""
    return "none" if value is None else value


Plugin = Annotated[Literal["none", "ddp", "zero1", "zero2", "zero3", "hybrid"], BeforeValidator(_null_is_none)]


class DatasetConfig(Section):
    """Where the clips come from."""

    type: Literal["video_text"] = Field("video_text", description="a table of clips with captions")
    transform_name: Literal["resize_crop"] = Field("resize_crop", description="resize to cover, then crop the centre")
    data_path: str | None = Field(
        None, min_length=1, description="the table, CSV or parquet, as `osora data meta` writes it"
    )
    root: str | None = Field(None, description="folder that relative clip paths are tried in last")
    fps_max: Int = Field(
        16, ge=1, description="clips of a higher rate are thinned to at most this many frames a second"
    )
    rand_sample_interval: Int | None = Field(None, ge=1, description="draw the frame interval from 1 to this instead")
    vmaf: bool = Field(False, description="put the table's motion score (column score_vmafmotion) into captions")
    memory_efficient: bool = Field(
        False, description="leave paths and captions of a parquet table on disk until they are needed"
    )
    balance_window: Int = Field(
        0, ge=0, description="batches put in order of cost at a time, so that ranks of a step cost alike; 0: none"
    )
    max_bad_fraction: Float = Field(
        0.05, ge=0, le=1, description="share of clips that may fail to decode before the run stops"
    )


class OptimConfig(Section):
    """The optimizer: AdamW in fp32 (`HybridAdam` names the same rule)."""

    cls: Literal["HybridAdam", "AdamW"] = Field("AdamW", description="HybridAdam under ColossalAI, else torch's AdamW")
    lr: Float = Field(1e-4, ge=0, description="learning rate after the warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the two moments")
    eps: Float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: Float = Field(0.0, ge=0, description="decoupled weight decay")
    adamw_mode: Literal[True] = Field(True, description="decoupled weight decay (the only kind)")


class LrSchedulerConfig(Section):
    """Learning rate over the updates."""

    warmup_steps: Int | None = Field(None, ge=0, description="updates of linear warm-up; null: none")
    initial_lr: Float = Field(1e-6, ge=0, description="learning rate that the warm-up starts from")
    use_cosine_scheduler: bool = Field(False, description="cosine decay to 0 over the run after the warm-up")


class PluginConfig(Section):
    """How a plugin is set up. Keys as in Open-Sora."""

    reduce_bucket_size_in_m: Int = Field(128, ge=1, description="size of a gradient bucket, million elements")
    overlap_allgather: bool = Field(False, description="gather parameters while the next step starts")
    replicate: Int = Field(
        1, ge=1, description="of zero2 and zero3: groups of neighbouring ranks that hold the whole state each"
    )
    cpu_offload: bool = Field(False, description="of zero2 and zero3: parameters and optimizer in the host's memory")
    zero_stage: Int = Field(2, ge=0, le=3, description="of hybrid: what is sharded over ranks, as zero1 to zero3")
    sp_size: Int = Field(1, ge=1, description="of hybrid: ranks that share the tokens of a sample")
    enable_sequence_parallelism: bool = Field(False, description="of hybrid: Open-Sora's key; sp_size above 1 says it")
    sequence_parallelism_mode: Literal["ring_attn", "all_to_all"] = Field(
        "all_to_all", description="of hybrid: Open-Sora's key; ring_attn is taken for all_to_all, with the same numbers"
    )
    tp_size: Int = Field(1, ge=1, description="of hybrid: Open-Sora's key; more than 1 is not supported")
    pp_size: Int = Field(1, ge=1, description="of hybrid: Open-Sora's key; more than 1 is not supported")
    static_graph: bool = Field(False, description="of hybrid: Open-Sora's key; not used")


class VaeLossConfig(Section):
    """Weights of the autoencoder's losses."""

    perceptual_loss_weight: Float = Field(0.5, ge=0, description="weight of LPIPS per pixel")
    kl_loss_weight: Float = Field(5e-4, ge=0, description="weight of the posterior's KL (a DC-AE has none)")
    logvar_init: Float = Field(0.0, description="constant log-variance of the reconstruction likelihood")
