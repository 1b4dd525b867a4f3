"""Small MMDiTs and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from support.golden import fill_by_rule, seeded_randn
from torch import Tensor

from osora_cli.config.models.flux import FluxConfig, Grid
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.packing import image_ids, text_ids

SMALL: dict[str, Any] = {
    "in_channels": 16,
    "vec_in_dim": 10,
    "context_in_dim": 12,
    "hidden_size": 48,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [4, 6, 6],
}


def small_config(**changes: Any) -> FluxConfig:
    return FluxConfig(**(SMALL | changes))


def small_model(**changes: Any) -> MMDiT:
    """A model whose weights follow the golden rule: all parts count, also those that start at zero."""
    model = MMDiT(small_config(**changes))
    fill_by_rule(model)
    return model


def inputs_for(
    config: FluxConfig, grid: Grid = (2, 3, 5), num_text: int = 7, batch: int = 2, seed: int = 1
) -> dict[str, Tensor]:
    """Inputs of a forward. The sizes are odd, so that nothing works by luck."""
    tokens = grid[0] * grid[1] * grid[2]
    inputs = {
        "img": seeded_randn((batch, tokens, config.in_channels), seed),
        "img_ids": image_ids(grid, batch),
        "txt": seeded_randn((batch, num_text, config.context_in_dim), seed + 1),
        "txt_ids": text_ids(num_text, batch),
        "timesteps": torch.linspace(0.1, 0.9, batch),
        "y_vec": seeded_randn((batch, config.vec_in_dim), seed + 2),
    }
    if config.cond_embed:
        inputs["cond"] = seeded_randn((batch, tokens, config.cond_channels), seed + 3)
    if config.guidance_embed:
        inputs["guidance"] = torch.full((batch,), 4.0)
    return inputs
