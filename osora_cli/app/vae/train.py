"""`osora train vae`: an autoencoder's first stage."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from osora_cli.app.feed import TableFeed
from osora_cli.app.schedules import run_schedule
from osora_cli.app.vae.evaluator import VaeEvaluator, check_eval_input
from osora_cli.app.vae.input import VaeInput, check_vae_input, clip_lengths
from osora_cli.app.vae.start import StartWeights, build_autoencoder, check_start
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.values import effective_lr
from osora_cli.data.sampler import Position
from osora_cli.engine.base import Engine, OptimSettings
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.evaluation import Evaluator
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.mixing import Mixing
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.vae import VaeTask, VaeTaskSettings


class VaeTraining:
    """Reconstruction, perceptual and KL loss; one network."""

    def __init__(self, config: TrainVaeConfig) -> None:
        """Check the input. Raises OsoraError of the kind that fits."""
        self.config = config
        self._start: StartWeights | None = None
        self._checked: VaeInput = check_vae_input(config)
        self.table, self.sampler, self.notes = self._checked.table, self._checked.sampler, self._checked.notes
        self.report = self._checked.report
        self._scored = check_eval_input(config, self.table)
        self.notes += self._scored.notes if self._scored else []

    def check_start(self, reader: CheckpointReader | None) -> None:
        self._start = check_start(self.config, self.notes, reader)

    def build(self, engine: Engine, reader: CheckpointReader | None) -> RunState:
        config = self.config
        network = engine.prepare(self._autoencoder(), optim_settings(config))
        task = VaeTask(
            network,
            engine,
            run_schedule(config, self.sampler, reader, self.notes),
            task_settings(config),
            perceptual=self._perceptual(engine),
        )
        ema = None if config.ema_decay is None else Ema(network.master_shards(), config.ema_decay)
        return RunState(task, ema, config.save_master_weights)

    def feed(self, engine: Engine, start: Position) -> Feed:
        return TableFeed(self.table, self.sampler, self.config, start, pin_memory=engine.device.type == "cuda")

    def evaluator(self, engine: Engine, state: RunState, folder: Path) -> Evaluator | None:
        return VaeEvaluator(self.config, self._scored, engine, state) if self._scored else None

    def _autoencoder(self) -> DcAe:
        return build_autoencoder(self.config, self._start)

    def _perceptual(self, engine: Engine) -> nn.Module | None:
        return self._checked.make_perceptual(engine.device) if self._checked.make_perceptual else None


def task_settings(config: TrainVaeConfig) -> VaeTaskSettings:
    """What an autoencoder's loss and its clips hang on."""
    losses = config.vae_loss_config
    return VaeTaskSettings(
        perceptual_weight=losses.perceptual_loss_weight,
        kl_weight=losses.kl_loss_weight,
        logvar=losses.logvar_init,
        grad_clip=config.grad_clip,
        mixing=Mixing(
            config.mixed_strategy,
            config.mixed_image_ratio,
            config.mixed_image_rule,
            lambda most: clip_lengths(config.model, most),
        ),
    )


def optim_settings(config: TrainVaeConfig) -> OptimSettings:
    """The first network's optimizer."""
    return OptimSettings(effective_lr(config), config.optim.betas, config.optim.eps, config.optim.weight_decay)
