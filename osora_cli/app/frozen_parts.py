"""The networks that diffusion training uses and does not train: autoencoder and text embedders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import nn

from osora_cli.app.reconstruct.find import Found, find_autoencoder
from osora_cli.app.reconstruct.net import load_net
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.dc_ae import DcAeConfig, plan
from osora_cli.data.sampler import BucketSampler
from osora_cli.errors import CheckpointError, ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.latents import Autoencoder, FrozenParts, encode_latents
from osora_cli.model.text import FrozenTextEmbedder


@dataclass(frozen=True)
class ResolvedConfig:
    """The config with its autoencoder's architecture known, and what the user should be told of that."""

    config: TrainDiffusionConfig
    notes: list[str] = field(default_factory=list)


def resolve_autoencoder(config: TrainDiffusionConfig) -> ResolvedConfig:
    """The config with the architecture of an own DC-AE, which `ae.from_pretrained` of a run or checkpoint brings along.

    In place of a run stands its newest verified checkpoint.

    Raises:
        ConfigError: no architecture is known, or it contradicts the run's.
        CheckpointError: nothing is there, or nothing that verifies.
    """
    ae = config.ae
    if ae.from_pretrained is None:
        _check_architecture(ae)
        return ResolvedConfig(config)
    found = _find(config)
    # Of a run, the checkpoint that is its newest now: the run may be trained on, and this keeps what it began with.
    # Nor does it hang on the folder that it is started in.
    weights = str(Path(found.weights).absolute()) if found.is_checkpoint else ae.from_pretrained
    settled = found.config.model_copy(update={"from_pretrained": weights})
    return ResolvedConfig(config.model_copy(update={"ae": settled}), list(found.notes))


def _check_architecture(ae: object) -> None:
    """Raises ConfigError for a DC-AE of which nothing says what it is made of: neither a run nor the config."""
    if isinstance(ae, DcAeConfig):
        try:
            plan(ae)
        except ConfigError as error:
            hint = "--ae.from-pretrained RUN takes a run of `osora train vae`, its architecture with it"
            raise ConfigError(error.message, where="ae", allowed=error.allowed, hint=hint) from error


def _find(config: TrainDiffusionConfig) -> Found:
    """The autoencoder's weights and architecture, with errors that name this config's keys."""
    try:
        return find_autoencoder(config.ae)
    except (ConfigError, CheckpointError) as error:
        texts = {name: _renamed(getattr(error, name)) for name in ("where", "allowed", "hint")}
        raise type(error)(error.message, **texts) from error


def _renamed(text: str | None) -> str | None:
    return None if text is None else text.replace("model.", "ae.")


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
    network = _load_autoencoder(config, device, dtype, notes)
    network.eval().requires_grad_(False)
    if config.compile_ae:
        network.encoder.compile()  # type: ignore[union-attr]
    return cast("Autoencoder", network)


def _load_autoencoder(
    config: TrainDiffusionConfig, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> nn.Module:
    section = config.ae
    if section.from_pretrained is None:
        notes.append(f"the autoencoder {section.type} has no weights but random ones: `ae.from_pretrained` is not set")
        return build_model(section, device=device, dtype=dtype, seed=config.seed)
    net = load_net(_find(config), use_ema=config.ae_use_ema, device=device, dtype=dtype)
    if net.step is not None:
        notes.append(f"autoencoder: {net.described()}")
    return net.model.to(dtype)


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


def warm_up(ae: Autoencoder, sampler: BucketSampler, device: torch.device, batch_size: int | None) -> int:
    """Encode grey clips of every shape that the sampler's first epoch has, each once; how many shapes there were.

    Kernels are compiled and chosen here, and not in the middle of the first epoch.
    """
    shapes = {(len(b.rows), b.frames, b.height, b.width) for b in sampler.epoch_batches(0)}
    for count, frames, height, width in sorted(shapes):
        encode_latents(ae, torch.zeros(count, 3, frames, height, width, device=device), batch_size=batch_size)
    return len(shapes)
