"""`osora train vae`: an autoencoder's first stage."""

from __future__ import annotations

from pathlib import Path

from osora_cli.app.feed import TableFeed
from osora_cli.app.schedules import make_schedule, total_updates
from osora_cli.app.vae_input import VaeInput, check_vae_input, clip_lengths
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.values import effective_lr, effective_warmup_steps
from osora_cli.data.sampler import Position
from osora_cli.engine.base import Engine, OptimSettings
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.evaluation import Evaluator
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.vae import VaeTask, VaeTaskSettings


class VaeTraining:
    """Reconstruction, perceptual and KL loss; one network."""

    def __init__(self, config: TrainVaeConfig) -> None:
        """Check the input. Raises OsoraError of the kind that fits."""
        self.config = config
        self._checked: VaeInput = check_vae_input(config)
        self.table, self.sampler, self.notes = self._checked.table, self._checked.sampler, self._checked.notes

    def build(self, engine: Engine, reader: CheckpointReader | None) -> RunState:
        config = self.config
        module = build_autoencoder(config, reader)
        network = engine.prepare(module, optim_settings(config))
        losses = config.vae_loss_config
        task = VaeTask(
            network,
            engine,
            self._schedule(reader),
            VaeTaskSettings(
                perceptual_weight=losses.perceptual_loss_weight,
                kl_weight=losses.kl_loss_weight,
                logvar=losses.logvar_init,
                grad_clip=config.grad_clip,
                mixed_strategy=config.mixed_strategy,
                mixed_image_ratio=config.mixed_image_ratio,
                lengths=lambda most: clip_lengths(config.model, most),
            ),
            perceptual=self._checked.make_perceptual(engine.device) if self._checked.make_perceptual else None,
        )
        ema = None if config.ema_decay is None else Ema(network.master_shards(), config.ema_decay)
        return RunState(task, ema, config.save_master_weights)

    def feed(self, engine: Engine, start: Position) -> Feed:
        return TableFeed(self.table, self.sampler, self.config, start, pin_memory=engine.device.type == "cuda")

    def evaluator(self, engine: Engine, state: RunState, folder: Path) -> Evaluator | None:
        return None

    def _schedule(self, reader: CheckpointReader | None) -> Schedule:
        config = self.config
        return make_schedule(
            config.lr_scheduler,
            reader,
            self.notes,
            lr=effective_lr(config),
            warmup_steps=effective_warmup_steps(config),
            update_warmup_steps=config.update_warmup_steps,
            total=total_updates(config, self.sampler),
        )


def build_autoencoder(config: TrainVaeConfig, reader: CheckpointReader | None) -> DcAe:
    """The autoencoder in fp32 on the CPU, from its seed or from `from_pretrained`."""
    # A checkpoint wins over `from_pretrained`: what it would load is overwritten at once.
    section = config.model if reader is None else config.model.model_copy(update={"from_pretrained": None})
    module = build_model(section, device="cpu", seed=config.seed)
    assert isinstance(module, DcAe)
    if config.grad_checkpoint:
        module.enable_grad_checkpoint()
    return module


def optim_settings(config: TrainVaeConfig) -> OptimSettings:
    """The first network's optimizer."""
    return OptimSettings(effective_lr(config), config.optim.betas, config.optim.eps, config.optim.weight_decay)
