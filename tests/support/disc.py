"""A second stage that takes a second: the tiny autoencoder of `tiny`, with a discriminator of as few parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import write_config

DISC: dict[str, Any] = {
    "discriminator": {"ndf": 8, "n_layers": 2},
    "optim_discriminator": {"lr": 2e-3, "betas": [0.9, 0.98]},
    "disc_lr_scheduler": {"warmup_steps": 2},
    "gen_loss_config": {"gen_start": 0, "disc_weight": 0.1},
    "disc_loss_config": {"disc_start": 0},
    "mixed_strategy": "mixed_video_image",
    "mixed_image_ratio": 0.3,
}


def write_disc_config(folder: Path, **changes: Any) -> Path:
    """`tiny.yaml` in `folder` for `osora train vae-disc`; sections in `changes` are laid over those of DISC."""
    merged = {**DISC, **changes}
    for key, value in DISC.items():
        if isinstance(value, dict) and key in changes:
            merged[key] = {**value, **changes[key]}
    return write_config(folder, **merged)
