"""The networks that diffusion training uses and does not train: autoencoder and text embedders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from osora_cli.app.recon_model import find_autoencoder, load_autoencoder
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.errors import ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.latents import Autoencoder, FrozenParts
from osora_cli.model.text import FrozenTextEmbedder


@dataclass(frozen=True)
class ResolvedConfig:
    """The config with its autoencoder's architecture known, and what the user should be told of that."""

    config: TrainDiffusionConfig
    notes: list[str] = field(default_factory=list)


def resolve_autoencoder(config: TrainDiffusionConfig) -> ResolvedConfig:
    """The config with the architecture of an own DC-AE, which `ae.from_pretrained` of a run or checkpoint brings along.

    Raises:
        ConfigError: no architecture is known, or it contradicts the run's.
        CheckpointError: nothing is there, or nothing that verifies.
    """
    ae = config.ae
    if not isinstance(ae, DcAeConfig) or ae.from_pretrained is None:
        return ResolvedConfig(config)
    try:
        found = find_autoencoder(ae)
    except ConfigError as error:
        where = error.where.replace("model", "ae", 1) if error.where else "ae"
        raise ConfigError(error.message, where=where, allowed=error.allowed, hint=error.hint) from error
    settled = found.config.model_copy(update={"from_pretrained": ae.from_pretrained})
    return ResolvedConfig(config.model_copy(update={"ae": settled}), list(found.notes))


def build_frozen_parts(
    config: TrainDiffusionConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ae: bool = True,
    text: bool = True,
    notes: list[str] | None = None,
) -> FrozenParts:
    """Autoencoder and text embedders with their weights, in eval mode and without gradients.

    Args:
        ae, text: which are needed; what comes from a cache needs none.
        notes: what the user should be told is added here.

    Raises:
        OsoraError: weights are missing, damaged or of another kind, or an extra is not installed.
    """
    notes = [] if notes is None else notes
    return FrozenParts(
        ae=_autoencoder(config, device, dtype, notes) if ae else None,
        t5=_embedder(config, "t5", device, dtype) if text else None,
        clip=_embedder(config, "clip", device, dtype) if text else None,
    )


def _autoencoder(
    config: TrainDiffusionConfig, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> Autoencoder:
    section = config.ae
    if section.from_pretrained is None:
        notes.append(f"the autoencoder {section.type} has no weights but random ones: `ae.from_pretrained` is not set")
    if isinstance(section, DcAeConfig) and section.from_pretrained is not None:
        loaded = load_autoencoder(find_autoencoder(section), use_ema=config.ae_use_ema, device=device, dtype=dtype)
        if loaded.step is not None:
            which = "averaged weights" if loaded.ema else "weights"
            notes.append(f"autoencoder: {which} of update {loaded.step} of {section.from_pretrained}")
        return loaded.model
    network = build_model(section, device=device, dtype=dtype, seed=config.seed)
    network.eval().requires_grad_(False)
    return cast("Autoencoder", network)


def _embedder(config: TrainDiffusionConfig, name: str, device: torch.device, dtype: torch.dtype) -> FrozenTextEmbedder:
    """One text embedder, whose width is the model's.

    Raises:
        ConfigError: it has another, or no pooled vector where one is needed.
    """
    embedder = build_model(getattr(config, name), device=device, dtype=dtype)
    assert isinstance(embedder, FrozenTextEmbedder)
    key = "context_in_dim" if name == "t5" else "vec_in_dim"
    wanted = getattr(config.model, key)
    width = embedder.token_width if name == "t5" else embedder.pooled_width
    if width != wanted:
        what = "gives no pooled vector" if width is None else f"gives `{width}` channels"
        raise ConfigError(f"the embedder {what}, and `model.{key}` is `{wanted}`", where=name)
    return embedder
