"""What a config of each command holds: every field, its default and its help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from osora_cli.config.base import Float, Int, Section
from osora_cli.config.evaluation import EvalConfig
from osora_cli.config.models.autoencoder import AutoencoderSection
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.sections import (
    BucketConfig,
    DatasetConfig,
    Dtype,
    LrSchedulerConfig,
    OptimConfig,
    Plugin,
    PluginConfig,
    VaeLossConfig,
)


class LoaderConfig(Section):
    """What every command that reads clips takes."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="where the clips come from")
    num_workers: Int = Field(4, ge=0, description="processes that decode clips; 0: none")
    prefetch_factor: Int = Field(2, ge=1, description="batches each worker holds ready")
    num_bucket_build_workers: Int = Field(
        1, ge=0, description="Open-Sora's key; buckets are built in one vectorised pass"
    )


class TrainConfig(LoaderConfig):
    """What every training takes."""

    bucket_config: BucketConfig = Field(
        default_factory=dict, description="{resolution: {frames: [probability, batch size]}}"
    )
    optim: OptimConfig = Field(default_factory=OptimConfig, description="the optimizer")
    lr: Float | None = Field(None, ge=0, description="learning rate; wins over optim.lr")
    lr_scheduler: LrSchedulerConfig = Field(default_factory=LrSchedulerConfig, description="learning rate over the run")
    warmup_steps: Int | None = Field(None, ge=0, description="wins over lr_scheduler.warmup_steps")
    update_warmup_steps: bool = Field(
        False, description="on resume, take warmup_steps from the config, not the checkpoint"
    )

    dtype: Dtype = Field("bf16", description="dtype of the computation; parameters and optimizer are always fp32")
    engine: Literal["auto", "native", "colossalai"] = Field(
        "auto", description="who owns and shards parameters; auto: colossalai where it is there and can, else native"
    )
    plugin: Plugin = Field("zero2", description="how ranks share the state")
    plugin_config: PluginConfig = Field(default_factory=PluginConfig, description="settings of the plugin")
    grad_clip: Float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    grad_checkpoint: bool = Field(False, description="recompute activations in the backward pass to save memory")
    accumulation_steps: Int = Field(1, ge=1, description="micro-batches per update")
    pin_memory_cache_pre_alloc_numels: list[Int] | None = Field(
        None, description="Open-Sora's key; staging buffers are sized from the state itself"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one")
    deterministic: bool = Field(False, description="deterministic kernels on CUDA, so that a resume is bit-exact there")
    collective_timeout_s: Float = Field(
        600.0, gt=0, description="longest that ranks wait for each other in an update, seconds; then the run ends"
    )
    max_nonfinite_steps: Int = Field(10, ge=1, description="non-finite updates in a row after which the run ends")

    seed: Int = Field(1024, ge=0, description="seed of every random draw")
    epochs: Int = Field(1000, ge=1, description="passes over the table")
    max_steps: Int | None = Field(None, ge=1, description="optimizer updates in all; null: by epochs")

    outputs: str = Field("outputs", min_length=1, description="folder that runs are made in")
    exp_name: str | None = Field(None, description="name of the run's folder; null: from config name and time")
    log_every: Int = Field(10, ge=1, description="updates per log line")
    tensorboard: bool = Field(True, description="write TensorBoard scalars")
    wandb: bool = Field(False, description="report to Weights & Biases (extra: wandb)")
    wandb_project: str = Field("osora", description="project at Weights & Biases")
    eval_every: Int = Field(0, ge=0, description="updates between scorings on fixed clips; 0: none")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="what is scored while it trains")
    profile: bool = Field(False, description="trace a few updates with torch's profiler into RUN/profile/")
    profile_updates: Int = Field(3, ge=1, description="updates of that trace")

    ckpt_every: Int = Field(1000, ge=0, description="updates per checkpoint; 0: only the last")
    ckpt_every_minutes: Float | None = Field(
        None, gt=0, description="minutes per checkpoint, beside ckpt_every, by rank 0's clock; null: not by time"
    )
    keep_n_latest: Int = Field(-1, ge=-1, description="verified checkpoints kept; -1: all")
    keep_every: Int = Field(
        0, ge=0, description="keep the first checkpoint of every so many updates for good; 0: none beside keep_n_latest"
    )
    async_io: bool = Field(False, description="write checkpoints in the background")
    async_io_backend: Literal["auto", "threads", "tensornvme"] = Field(
        "auto", description="who writes the bytes; auto: tensornvme where it can run, else threads"
    )
    async_io_buffer_gib: Float = Field(16.0, gt=0, description="largest host memory for staging a checkpoint, GiB")
    on_save_error: Literal["stop", "continue"] = Field("stop", description="whether a failed save ends the run")
    save_master_weights: bool = Field(True, description="save fp32 weights when compute is not fp32 (exact resume)")
    ema_decay: Float | None = Field(None, ge=0, lt=1, description="decay of the fp32 average of weights; null: no EMA")

    load: list[str] | str | None = Field(None, description="checkpoint, run or wildcard to go on from")
    start_epoch: Int | None = Field(None, ge=0, description="with --load: epoch to start from")
    start_step: Int | None = Field(None, ge=0, description="with --load: micro-batch of the epoch to start from")


class TrainVaeConfig(TrainConfig):
    """`osora train vae`."""

    model: DcAeConfig = Field(default_factory=DcAeConfig, description="the autoencoder")
    mixed_strategy: Literal["mixed_video_image", "mixed_video_random"] | None = Field(
        None, description="train on stills (first frames) as well, or on shorter clips"
    )
    mixed_image_ratio: Float = Field(0.0, ge=0, le=1, description="share of stills")
    mixed_image_rule: Literal["balanced", "open_sora"] = Field(
        "balanced",
        description="balanced: every rank, all frames of a clip as stills, one length for all ranks, so that none "
        "waits; open_sora: all ranks but the first, one still, each rank its own length",
    )
    freeze_layers: list[str] | str | None = Field(
        None, description="parts of the model that are not trained, by name: encoder, decoder, decoder.stages.0"
    )
    pretrained_ema: bool = Field(
        False, description="start from the average of weights that `model.from_pretrained` holds, not the weights"
    )
    vae_loss_config: VaeLossConfig = Field(default_factory=VaeLossConfig, description="weights of the losses")


class ReconstructConfig(LoaderConfig):
    """`osora infer reconstruct`."""

    model: AutoencoderSection = Field(default_factory=DcAeConfig, description="the autoencoder, dc_ae or hunyuan_vae")
    bucket_config: BucketConfig = Field(
        default_factory=dict, description="window and size of each clip; empty: whole clips as they are"
    )
    dtype: Dtype = Field("bf16", description="dtype of the computation")
    batch_size: Int = Field(1, ge=1, description="clips per batch")
    seed: Int = Field(42, ge=0, description="seed of the windows")
    save_dir: str = Field(
        "samples", min_length=1, description="folder for orig/, recn/, side_by_side/, the picture and metrics.json"
    )
    lossless: bool = Field(False, description="keep every RGB value in the videos (H.264 in RGB, large files)")
    side_by_side: bool = Field(True, description="write a video of each clip with its reconstruction on the right")
    plugin: str | None = Field(None, description="Open-Sora's key; not used")
    use_ema: bool = Field(True, description="take the averaged weights where the checkpoint has them")
    num_samples: Int | None = Field(None, ge=1, description="clips of the table to reconstruct; null: all")
    lpips: bool | None = Field(
        None, description="score with LPIPS; null: where its weights are (`osora weights fetch lpips-vgg`)"
    )
