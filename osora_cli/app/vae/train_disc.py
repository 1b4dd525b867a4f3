"""`osora train vae-disc`: an autoencoder's second stage, against a discriminator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from osora_cli.app.checkpoint_fit import check_fits
from osora_cli.app.schedules import make_schedule, run_schedule, total_updates
from osora_cli.app.vae.train import VaeTraining, optim_settings, task_settings
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.verify import is_checkpoint
from osora_cli.config.vae_disc import TrainVaeDiscConfig
from osora_cli.data.buckets import Bucket
from osora_cli.engine.base import Engine, OptimSettings
from osora_cli.errors import CheckpointError, ConfigError, UsageError
from osora_cli.model.build import build_model
from osora_cli.model.discriminator import NLayerDiscriminator3D
from osora_cli.model.losses import LastConvRecorder
from osora_cli.model.weights import HUB, check_weights
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.vae_gan import GanSettings, VaeGanTask


class VaeDiscTraining(VaeTraining):
    """The losses of the first stage plus an adversarial one; two networks."""

    def __init__(self, config: TrainVaeDiscConfig) -> None:
        super().__init__(config)
        self._disc_config = config
        _check_sizes(config, self.sampler.table.buckets)

    def check_start(self, reader: CheckpointReader | None) -> None:
        config = self._disc_config
        if reader is None and config.model.from_pretrained is None:
            _check_scratch(config, self.notes)
        super().check_start(reader)
        if reader is not None and not config.restart_disc and "discriminator" in reader.groups():
            check_fits(reader, "discriminator", "disc_optimizer", _meta_discriminator(config))
        if reader is not None and config.restart_disc:
            self.notes.append("restart_disc: the checkpoint's discriminator and its optimizer are left out")
        if reader is None or config.restart_disc:
            self._check_disc_start()
        elif "discriminator" not in reader.groups():
            raise UsageError(
                f"`{reader.path}` is of a first stage: it holds no discriminator to go on with",
                where="--load",
                hint=f"osora train vae-disc CONFIG --from-pretrained {reader.path}\n"
                "starts a second stage from its weights; `--load CKPT --restart-disc` keeps optimizer and counters too",
            )

    def _check_disc_start(self) -> None:
        config = self._disc_config
        source = _discriminator_source(config)
        if source is None:
            self.notes.append("the discriminator is fresh, drawn from the seed")
            return
        if not source.startswith(HUB):
            report = check_weights(_meta_discriminator(config), source)
            if config.discriminator.strict_load and not report.fits:
                raise CheckpointError(report.text(), where="discriminator.from_pretrained")
        self.notes.append(f"the discriminator starts from {source}, its optimizer anew")

    def build(self, engine: Engine, reader: CheckpointReader | None) -> RunState:
        config = self._disc_config
        module = self._autoencoder()
        recorder = LastConvRecorder.of(module, module.get_last_layer())
        network = engine.prepare(module, optim_settings(config))
        # A checkpoint wins over `from_pretrained`: what it would load is overwritten at once.
        loads = reader is not None and not config.restart_disc
        source = None if loads else _discriminator_source(config)
        discriminator = engine.prepare(_build_discriminator(config, source), disc_optim_settings(config))
        task = VaeGanTask(
            network,
            discriminator,
            engine,
            run_schedule(config, self.sampler, reader, self.notes),
            self._disc_schedule(reader),
            recorder,
            task_settings(config),
            gan_settings(config),
            perceptual=self._perceptual(engine),
        )
        ema = None if config.ema_decay is None else Ema(network.master_shards(), config.ema_decay)
        fresh = frozenset({"discriminator"}) if config.restart_disc else frozenset[str]()
        return RunState(task, ema, config.save_master_weights, fresh)

    def _disc_schedule(self, reader: CheckpointReader | None) -> Schedule:
        config = self._disc_config
        return make_schedule(
            config.disc_lr_scheduler,
            None if config.restart_disc else reader,
            self.notes,
            lr=config.optim_discriminator.lr,
            warmup_steps=config.disc_lr_scheduler.warmup_steps or 0,
            update_warmup_steps=config.update_warmup_steps,
            total=total_updates(config, self.sampler),
            name="disc_lr_scheduler",
        )


def gan_settings(config: TrainVaeDiscConfig) -> GanSettings:
    """What the adversarial terms hang on."""
    gen, disc = config.gen_loss_config, config.disc_loss_config
    return GanSettings(
        gen_start=gen.gen_start,
        gen_ramp=gen.gen_ramp,
        gen_factor=gen.disc_factor,
        disc_weight=gen.disc_weight,
        weight_per_rank=gen.weight_per_rank,
        disc_start=disc.disc_start,
        disc_factor=disc.disc_factor,
        disc_loss=disc.disc_loss_type,
        max_ratio=gen.max_ratio,
    )


def disc_optim_settings(config: TrainVaeDiscConfig) -> OptimSettings:
    """The discriminator's optimizer."""
    optim = config.optim_discriminator
    return OptimSettings(optim.lr, optim.betas, optim.eps, optim.weight_decay)


def _discriminator_source(config: TrainVaeDiscConfig) -> str | None:
    """Where the discriminator's weights lie: of a checkpoint, in its folder `discriminator`."""
    source = config.discriminator.from_pretrained
    if source is not None and is_checkpoint(Path(source).expanduser()):
        return str(Path(source).expanduser() / "discriminator")
    return source


def _build_discriminator(config: TrainVaeDiscConfig, source: str | None) -> NLayerDiscriminator3D:
    """The discriminator in fp32 on the CPU, from the seed or from weights."""
    module = build_model(
        config.discriminator.model_copy(update={"from_pretrained": source}), device="cpu", seed=config.seed
    )
    assert isinstance(module, NLayerDiscriminator3D)
    return module


def _meta_discriminator(config: TrainVaeDiscConfig) -> NLayerDiscriminator3D:
    network = build_model(config.discriminator.model_copy(update={"from_pretrained": None}), device="meta")
    assert isinstance(network, NLayerDiscriminator3D)
    return network


def _check_scratch(config: TrainVaeDiscConfig, notes: list[str]) -> None:
    """A second stage that begins with an untrained autoencoder is a slip, unless the adversarial term comes later.

    Raises:
        CheckpointError: it would count from the first update on.
    """
    start = config.gen_loss_config.gen_start
    if start > 1:
        notes.append(
            f"no --from-pretrained: the autoencoder starts from the seed, the adversarial term joins at update {start}"
        )
        return
    raise UsageError(
        "a second stage needs the weights of a first one, and none are given",
        where="--from-pretrained",
        allowed="a run of `osora train vae`, a checkpoint in it, or a file of weights",
        hint="osora train vae-disc CONFIG --from-pretrained outputs/RUN\n"
        "To go on with a second stage: `--load outputs/RUN`. To train from the start with the adversarial term from "
        "update N on: `--gen-loss-config.gen-start N`",
    )


def _check_sizes(config: TrainVaeDiscConfig, buckets: Sequence[Bucket]) -> None:
    """Whether batch norm gets two values a channel, at the least, of what each bucket gives.

    Raises:
        ConfigError: it does not.
    """
    network = _meta_discriminator(config)
    for bucket in buckets:
        for clips, frames in _batches(config, bucket):
            t, h, w = network.logit_size(frames, bucket.height, bucket.width)
            if clips * t * h * w < 2:
                raise ConfigError(
                    f"a batch of {clips} at {bucket.height}x{bucket.width} px, {frames} frames, leaves the "
                    "discriminator's batch norm one value a channel",
                    where="bucket_config",
                    hint="take a larger size or batch, or a smaller `--discriminator.n-layers`",
                )


def _batches(config: TrainVaeDiscConfig, bucket: Bucket) -> Iterator[tuple[int, int]]:
    """(clips, frames) of what the discriminator may get of a bucket, the smallest of each kind."""
    clips, frames = bucket.batch_size, bucket.frames
    yield clips, frames
    if config.mixed_strategy == "mixed_video_random":
        yield clips, 1
    elif config.mixed_strategy is not None and config.mixed_image_ratio > 0:
        yield (clips * frames if config.mixed_image_rule == "balanced" else clips), 1
