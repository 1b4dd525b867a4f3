"""`osora train diffusion`: the diffusion transformer over an autoencoder's latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from osora_cli.app.cache.feed import CachedFeed, null_from_cache, open_cache, require_epoch
from osora_cli.app.checkpoint_fit import check_fits
from osora_cli.app.diffusion.compiling import Compilation, compilation
from osora_cli.app.diffusion.evaluator import check_diffusion_eval, make_diffusion_evaluator
from osora_cli.app.diffusion.input import DiffusionInput, check_diffusion_input
from osora_cli.app.diffusion.start import build_mmdit, check_model_start, unloaded
from osora_cli.app.feed import TableFeed
from osora_cli.app.frozen_parts import build_frozen_parts, warm_up
from osora_cli.app.schedules import run_schedule
from osora_cli.app.vae.start import StartWeights
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.autoencoder import compression, is_causal
from osora_cli.config.values import effective_lr
from osora_cli.data.sampler import Position
from osora_cli.engine.base import Engine, OptimSettings
from osora_cli.model.build import build_model
from osora_cli.model.latents import FrozenParts, TextBundle, null_text
from osora_cli.tensors import DTYPES
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion import DiffusionTask, DiffusionTaskSettings
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.evaluation import Evaluator
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.saving import RunState


class DiffusionTraining:
    """Rectified flow; one network is trained, autoencoder and text embedders are not."""

    def __init__(self, config: TrainDiffusionConfig) -> None:
        """Check the input. Raises OsoraError of the kind that fits."""
        self._checked: DiffusionInput = check_diffusion_input(config)
        self.config = self._checked.config
        self.table, self.sampler, self.notes = self._checked.table, self._checked.sampler, self._checked.notes
        self.report = self._checked.report
        self._start: StartWeights | None = None
        self._cache = open_cache(self.table, self.config)
        if self._cache is not None:
            require_epoch(self._cache, self.sampler, self.config, 0)
            self.notes.append(f"from the cache `{self._cache.folder}`: {_cached_parts(self.config)}")
        self._eval = check_diffusion_eval(self.config, self.table)
        self.notes += self._eval.notes if self._eval is not None else []
        self._frozen: tuple[FrozenParts, TextBundle] | None = None
        self._compilation: Compilation | None = None

    def check_start(self, reader: CheckpointReader | None) -> None:
        """What the model starts from. A checkpoint wins over `from_pretrained`, which it would overwrite at once."""
        section = self.config.model
        if reader is None:
            self._start = check_model_start(self.config, self.notes)
            return
        check_fits(reader, "model", "optimizer", build_model(unloaded(section), device="meta"))
        if section.from_pretrained is not None:
            given = section.from_pretrained
            self.notes.append(f"the weights are the checkpoint's: `model.from_pretrained` `{given}` is not read")

    def build(self, engine: Engine, reader: CheckpointReader | None) -> RunState:
        config = self.config
        # The frozen networks first: what cannot be had is found before the large one is made.
        scored, dtype = self._eval is not None, DTYPES[config.dtype]
        ae, text = scored or not config.cached_video, scored or not config.cached_text
        parts = build_frozen_parts(config, engine.device, dtype, ae=ae, text=text, notes=self.notes)
        null = null_from_cache(self._cache, config)
        null = null_text(parts) if null is None else null
        self._frozen = (parts, null)
        if config.warmup_ae and parts.ae is not None:
            warm_up(parts.ae, self.sampler, engine.device, config.ae_batch_size)
        module = build_mmdit(config, self._start, engine.device, self.notes)
        self._compilation = compilation(config, module, self.sampler, engine.device, self.notes)
        network = engine.prepare(module, optim_settings(config))
        task = DiffusionTask(
            network, engine, run_schedule(config, self.sampler, reader, self.notes), task_settings(config), parts, null
        )
        ema = None if config.ema_decay is None else Ema(network.master_shards(), config.ema_decay)
        return RunState(task, ema, config.save_master_weights, load_masters=config.load_master_weights)

    def warm_up(self, engine: Engine, state: RunState, tell: Callable[[str], None]) -> None:
        """Compile the blocks for the shapes of the buckets."""
        if self._compilation is not None:
            assert isinstance(state.task, DiffusionTask)
            self._compilation.ahead(state.task, engine.world_size, tell)

    def feed(self, engine: Engine, start: Position) -> Feed:
        pin = engine.device.type == "cuda"
        if self._cache is not None:
            return CachedFeed(self.table, self.sampler, self.config, start, self._cache, pin_memory=pin)
        return TableFeed(self.table, self.sampler, self.config, start, pin_memory=pin)

    def evaluator(self, engine: Engine, state: RunState, folder: Path) -> Evaluator | None:
        if self._eval is None or self._frozen is None:
            return None
        return make_diffusion_evaluator(self.config, self._eval, engine, state, *self._frozen, folder)


def _cached_parts(config: TrainDiffusionConfig) -> str:
    return " and ".join(
        what for what, on in (("latents", config.cached_video), ("text embeddings", config.cached_text)) if on
    )


def task_settings(config: TrainDiffusionConfig) -> DiffusionTaskSettings:
    """What a step hangs on."""
    weights: dict[str, float] | None = None
    if config.condition_config is not None:
        weights = {kind: weight for kind, weight in config.condition_config.items()}  # noqa: C416 - of plain text keys
    return DiffusionTaskSettings(
        patch_size=config.model.patch_size,
        rules=latent_rules(config),
        sigma_min=config.sigma_min,
        dropout_t5=config.dropout_ratio.t5,
        dropout_clip=config.dropout_ratio.clip,
        condition_weights=weights,
        no_reference_loss=config.no_i2v_ref_loss,
        guidance=config.guidance if config.model.guidance_embed else None,
        grad_clip=config.grad_clip,
        sequence_ranks=config.plugin_config.sp_size if config.plugin == "hybrid" else 1,
        ae_batch_size=config.ae_batch_size,
    )


def latent_rules(config: TrainDiffusionConfig) -> LatentRules:
    """How the autoencoder counts time."""
    return LatentRules(compression(config.ae)[0], is_causal(config.ae))


def optim_settings(config: TrainDiffusionConfig) -> OptimSettings:
    """The optimizer's settings; top-level values win, as in Open-Sora."""
    eps = config.optim.eps if config.eps is None else config.eps
    return OptimSettings(effective_lr(config), config.optim.betas, eps, config.optim.weight_decay)
