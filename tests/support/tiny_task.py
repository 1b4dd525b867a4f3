"""The tasks of autoencoder training, both stages, over an autoencoder of a few thousand parameters."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny import CONFIG
from torch import nn

from osora_cli.config.models.discriminator import DiscriminatorConfig
from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine
from osora_cli.model.build import build_model
from osora_cli.model.losses import LastConvRecorder
from osora_cli.model.perceptual import LPIPS
from osora_cli.trainer.mixing import Mixing
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.vae import VaeTask, VaeTaskSettings
from osora_cli.trainer.vae_gan import GanSettings, VaeGanTask

OPTIM = OptimSettings(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
GAN = GanSettings(0, 0, 1.0, 0.1, False, 0, 1.0, "hinge")
DISC = DiscriminatorConfig(ndf=8, n_layers=2)


def batch(video: torch.Tensor) -> ClipBatch:
    none: tuple[Any, ...] = ()
    return ClipBatch(video.to(torch.uint8), none, none, none, none, none, none, none, 0.0)


def clips(seed: int, count: int = 2) -> ClipBatch:
    generator = torch.Generator().manual_seed(seed)
    return batch(torch.randint(0, 256, (count, 3, 8, 32, 32), generator=generator))


def perceptual() -> LPIPS:
    """The real net with weights drawn at random: pretrained ones may not be on this machine."""
    net = LPIPS()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for key, p in net.named_parameters():
            p.copy_(torch.randn(p.shape) * (2 / max(1, p[0].numel())) ** 0.5 if p.ndim == 4 else torch.zeros_like(p))
            if key.startswith("lin"):
                p.abs_()
    return net


def made(
    stage: int,
    dtype: str = "fp32",
    gan: GanSettings = GAN,
    lpips: nn.Module | None = None,
    clip: float = 1.0,
    device: str = "cpu",
) -> VaeTask | VaeGanTask:
    engine = NativeEngine(torch.device(device), dtype, "none")
    module = build_model({**CONFIG["model"]}, seed=1)
    settings = VaeTaskSettings(0.5 if lpips else 0.0, 0.0, 0.0, clip, Mixing(None, 0.0, "balanced", lambda n: [n]))
    schedule = Schedule(1e-3)
    if stage == 1:
        return VaeTask(engine.prepare(module, OPTIM), engine, schedule, settings, lpips)
    recorder = LastConvRecorder.of(module, module.get_last_layer())  # type: ignore[operator]
    network = engine.prepare(module, OPTIM)
    disc = engine.prepare(build_model(DISC, seed=2), OPTIM)
    return VaeGanTask(network, disc, engine, schedule, Schedule(2e-3), recorder, settings, gan, lpips)
