"""What a step of each training is on the meta device: its networks, and one forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import nn

from osora_cli.app.diffusion.start import model_section
from osora_cli.app.diffusion.train import latent_rules
from osora_cli.app.diffusion.train import task_settings as diffusion_settings
from osora_cli.app.dry_run.meta_engine import MetaEngine
from osora_cli.app.dry_run.shapes import Shape
from osora_cli.app.vae.start import freeze
from osora_cli.app.vae.train import optim_settings, task_settings
from osora_cli.app.vae.train_disc import disc_optim_settings, gan_settings
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.autoencoder import compression
from osora_cli.config.models.text import DEFAULT_MAX_LENGTH, TextEmbedderConfig
from osora_cli.config.schema import TrainConfig, TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig
from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import OptimSettings, Trained
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.latents import TextBundle, encode_latents, predict_velocity
from osora_cli.model.losses import LastConvRecorder
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.perceptual import LPIPS
from osora_cli.tensors import DTYPES
from osora_cli.trainer.flow import sample_losses
from osora_cli.trainer.mixing import Mixing
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext, TrainTask
from osora_cli.trainer.vae import VaeTask, VaeTaskSettings
from osora_cli.trainer.vae_gan import VaeGanTask

# Parameters of the text encoders of Open-Sora 2.0, whose weights are not looked at here.
TEXT_PARAMETERS = {"t5": 4_762_310_656, "clip": 123_060_480}
# Stills and shorter clips are shapes of their own here, not draws.
_NO_MIXING = Mixing(None, 0.0, "balanced", lambda _: [])


@dataclass
class Probe:
    """A training as shapes.

    Attributes:
        networks: trained networks by the name of their part in a checkpoint.
        frozen: bytes of networks that are used and not trained, by name.
        known: tensors whose bytes are counted as networks, and not as a step's.
        passes: what a step does one after the other; each for a batch's shape.
        sequence_ranks: among how many ranks the tokens of a pass over the trained networks, the last, are shared.
    """

    engine: MetaEngine
    names: list[str]
    passes: list[Callable[[Shape], None]]
    sequence_ranks: int = 1
    frozen: dict[str, int] = field(default_factory=dict)
    kept: list[nn.Module] = field(default_factory=list)

    def known(self) -> Iterable[torch.Tensor]:
        yield from self.engine.tensors()
        for module in self.kept:
            yield from module.parameters()
            yield from module.buffers()


def make_probe(command: str, config: TrainConfig) -> Probe:
    """The probe of a training command. Nothing is read from disk."""
    if command == "train vae":
        return _vae(cast("TrainVaeConfig", config))
    if command == "train vae-disc":
        return _vae_disc(cast("TrainVaeDiscConfig", config))
    if command == "train diffusion":
        return _diffusion(cast("TrainDiffusionConfig", config))
    raise ValueError(f"`{command}` is no training")


def _vae(config: TrainVaeConfig) -> Probe:
    engine = MetaEngine(DTYPES[config.dtype])
    network = engine.prepare(_autoencoder(config), optim_settings(config))
    perceptual = _perceptual(config)
    task = VaeTask(network, engine, Schedule(1.0), _settings(config), perceptual=perceptual)
    return _probe(engine, task, perceptual)


def _vae_disc(config: TrainVaeDiscConfig) -> Probe:
    engine = MetaEngine(DTYPES[config.dtype])
    module = _autoencoder(config)
    recorder = LastConvRecorder.of(module, module.get_last_layer())
    network = engine.prepare(module, optim_settings(config))
    section = config.discriminator.model_copy(update={"from_pretrained": None})
    discriminator = engine.prepare(build_model(section, device="meta"), disc_optim_settings(config))
    perceptual = _perceptual(config)
    task = VaeGanTask(
        network, discriminator, engine, Schedule(1.0), Schedule(1.0), recorder, _settings(config),
        gan_settings(config), perceptual=perceptual,
    )  # fmt: skip
    # An update in which both have begun.
    update = max(config.gen_loss_config.gen_start, config.disc_loss_config.disc_start) + 1
    return _probe(engine, task, perceptual, update)


def _settings(config: TrainVaeConfig) -> VaeTaskSettings:
    return replace(task_settings(config), mixing=_NO_MIXING)


def _autoencoder(config: TrainVaeConfig) -> DcAe:
    module = build_model(config.model.model_copy(update={"from_pretrained": None}), device="meta")
    assert isinstance(module, DcAe)
    if config.grad_checkpoint:
        module.enable_grad_checkpoint()
    freeze(module, config.freeze_layers)
    return module


def _perceptual(config: TrainVaeConfig) -> LPIPS | None:
    if config.vae_loss_config.perceptual_loss_weight == 0:
        return None
    with torch.device("meta"):
        return LPIPS(compute_dtype=DTYPES[config.dtype])


def _probe(engine: MetaEngine, task: TrainTask, perceptual: LPIPS | None, update: int = 0) -> Probe:
    context = StepContext(seed=0, update=update, micro=0, accumulation=1, rank=0, world_size=1)

    def step(shape: Shape) -> None:
        task.micro_step(meta_batch(shape), context)

    kept: list[nn.Module] = [] if perceptual is None else [perceptual]
    frozen = {} if perceptual is None else {"LPIPS": module_bytes(perceptual)}
    return Probe(engine, list(task.networks), [step], frozen=frozen, kept=kept)


def _diffusion(config: TrainDiffusionConfig) -> Probe:
    dtype = DTYPES[config.dtype]
    engine = MetaEngine(dtype)
    module = build_model(model_section(config), device="meta")
    assert isinstance(module, MMDiT)
    if config.grad_checkpoint:
        module.enable_grad_checkpoint(True)
    network = engine.prepare(module, OptimSettings(1.0, (0.9, 0.999), 1e-8, 0.0))
    probe = Probe(engine, ["model"], [], diffusion_settings(config).sequence_ranks)
    if not config.cached_video:
        ae = build_model(config.ae.model_copy(update={"from_pretrained": None}), device="meta", dtype=dtype)
        ae.eval().requires_grad_(False)
        probe.frozen["autoencoder"] = module_bytes(ae)
        probe.kept.append(ae)
        assert isinstance(ae, DcAe | HunyuanVae)
        probe.passes.append(partial(_encode, config, ae))
    if not config.cached_text:
        for name in ("t5", "clip"):
            probe.frozen[name] = _text_bytes(getattr(config, name), name, dtype)
    probe.passes.append(lambda shape: _denoise(config, network, shape))
    return probe


def _encode(config: TrainDiffusionConfig, ae: DcAe | HunyuanVae, shape: Shape) -> None:
    """One tile of as many clips as are encoded at a time, beside the clips: the other tiles take no more, and hundreds
    of them would take as many times as long."""
    clips = torch.empty(
        shape.clips, 3, shape.frames, shape.height, shape.width, device="meta", dtype=DTYPES[config.dtype]
    )
    batch, frames, height, width = min(shape.clips, config.ae_batch_size or shape.clips), *clips.shape[2:]
    if ae.time_tiles is not None:
        frames = min(frames, ae.time_tiles.latent * ae.time_tiles.ratio + latent_rules(config).causal)
    if ae.space_tiles is not None:
        edge = ae.space_tiles.latent * ae.space_tiles.ratio
        height, width = min(height, edge), min(width, edge)
    encode_latents(ae, clips[:batch, :, :frames, :height, :width])


def _denoise(config: TrainDiffusionConfig, network: Trained, shape: Shape) -> None:
    _, space = compression(config.ae)
    frames = latent_rules(config).frames(shape.frames)
    channels = config.model.in_channels // config.model.patch_size**2
    size = (shape.clips, channels, frames, shape.height // space, shape.width // space)
    latents = torch.empty(size, device="meta")
    cond = torch.empty(size[0], 1 + channels, *size[2:], device="meta") if config.model.cond_embed else None
    length = config.t5.max_length or DEFAULT_MAX_LENGTH["t5"]
    text = TextBundle(
        torch.empty(shape.clips, length, config.model.context_in_dim, device="meta", dtype=network.compute_dtype),
        torch.empty(shape.clips, config.model.vec_in_dim, device="meta", dtype=network.compute_dtype),
    )
    predicted = predict_velocity(
        network.module, latents, torch.empty(shape.clips, device="meta"), text, cond,
        config.guidance if config.model.guidance_embed else None, patch_size=config.model.patch_size,
    )  # fmt: skip
    network.backward(sample_losses(predicted, latents, None).mean())


def _text_bytes(section: TextEmbedderConfig, name: str, dtype: torch.dtype) -> int:
    return 0 if section.kind == "hashed_ngrams" else TEXT_PARAMETERS[name] * dtype.itemsize


def meta_batch(shape: Shape) -> ClipBatch:
    """A batch of clips that has a shape and no pixels."""
    video = torch.empty(shape.clips, 3, shape.frames, shape.height, shape.width, dtype=torch.uint8, device="meta")
    zeros = (0,) * shape.clips
    return ClipBatch(
        video=video,
        rows=zeros,
        positions=zeros,
        texts=("",) * shape.clips,
        fps=(0.0,) * shape.clips,
        motion_scores=(0.0,) * shape.clips,
        replaced=(),
        shortened=(),
        wait_s=0.0,
    )


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's state."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())
