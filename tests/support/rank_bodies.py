"""What the ranks of `support.distributed` do."""

from __future__ import annotations

from typing import Any

import torch
from support.dc_ae import light_config, lively
from support.mmdit import inputs_for, small_config, small_model
from torch import Tensor, nn

from osora_cli.engine.base import OptimSettings, Trained
from osora_cli.engine.native import NativeEngine
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.settings import PluginSettings
from osora_cli.model.dc_ae.autoencoder import DcAe

OPTIM = OptimSettings(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
GLOBAL_BATCH = 6


def network(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "mmdit":
        return small_model()
    model = lively(DcAe(light_config(time=2, space=4)))
    return model


def clip(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, 3, 4, 16, 16, generator=generator) * 2 - 1


def loss_of(kind: str, trained: Trained, samples: list[int]) -> Tensor:
    """Mean loss over samples, each drawn from its number."""
    if kind == "mmdit":
        parts = []
        for number in samples:
            inputs = inputs_for(small_config(), batch=1, seed=10 * number)
            parts.append((trained.module(**inputs).float() - inputs["img"]).square().mean())
        return torch.stack(parts).mean()
    video = torch.cat([clip(number) for number in samples])
    reconstruction, _, _ = trained.module(video.to(trained.compute_dtype))
    return (reconstruction.float() - video).abs().mean()


def prepare(ranks: Ranks, kind: str, plugin: str, dtype: str = "fp32", **settings: Any) -> Trained:
    engine = NativeEngine(torch.device("cpu"), dtype, plugin, ranks=ranks, settings=PluginSettings(**settings))
    return engine.prepare(network(kind), OPTIM)


def train(
    ranks: Ranks, kind: str, plugin: str, dtype: str, updates: int, accumulation: int, **settings: Any
) -> dict[str, Any]:
    """Losses, gradient norms and the weights in the end; the global batch is shared out over ranks."""
    trained = prepare(ranks, kind, plugin, dtype, **settings)
    share = GLOBAL_BATCH // ranks.world_size // accumulation
    losses, norms = [], []
    for update in range(updates):
        total = torch.zeros(())
        for micro in range(accumulation):
            first = update * GLOBAL_BATCH + (ranks.rank * accumulation + micro) * share
            samples = list(range(first, first + share))
            if micro + 1 < accumulation:
                with trained.no_sync():
                    loss = loss_of(kind, trained, samples)
                    trained.backward(loss / accumulation)
            else:
                loss = loss_of(kind, trained, samples)
                trained.backward(loss / accumulation)
            total += loss.detach() / accumulation
        result = trained.update(1e-3, 0.05)
        losses.append(float(ranks.mean(total)))
        norms.append(float(result.grad_norm))
    return {"losses": losses, "norms": norms, "model": pieces(trained.model_shards())}


def pieces(shards: Any) -> list[tuple[str, int, Tensor]]:
    return [(s.key, s.start, s.tensor.detach().reshape(-1).clone()) for s in shards]
