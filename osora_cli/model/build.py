"""From a config section to a network: one registry, by `type`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from osora_cli.config.base import Section
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.discriminator import DiscriminatorConfig
from osora_cli.config.models.flux import FluxConfig
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.config.models.perceptual import LpipsConfig
from osora_cli.config.models.text import TextEmbedderConfig
from osora_cli.errors import ConfigError
from osora_cli.model.weights import load_weights


@dataclass(frozen=True)
class _Entry:
    section: type[Section]
    network: str  # module:class, imported when it is built
    loads_itself: bool = False  # module:function(section, *, device, dtype) instead, which finds its own weights


REGISTRY: dict[str, _Entry] = {
    "dc_ae": _Entry(DcAeConfig, "osora_cli.model.dc_ae.autoencoder:DcAe"),
    "hunyuan_vae": _Entry(HunyuanVaeConfig, "osora_cli.model.hunyuan_vae.autoencoder:HunyuanVae"),
    "flux": _Entry(FluxConfig, "osora_cli.model.mmdit.model:MMDiT"),
    "N_Layer_discriminator_3D": _Entry(DiscriminatorConfig, "osora_cli.model.discriminator:NLayerDiscriminator3D"),
    "LPIPS": _Entry(LpipsConfig, "osora_cli.model.lpips_weights:build_lpips", loads_itself=True),
    "text_embedder": _Entry(TextEmbedderConfig, "osora_cli.model.text_build:build_text_embedder", loads_itself=True),
}


def build_model(
    config: Mapping[str, Any] | Section,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """The network that `config` describes, initialised from `seed`, or with the weights of `from_pretrained`.

    Args:
        config: a config section, or a mapping with its `type`.
        device: where it ends up; "meta" gives shapes without memory, and no weights are loaded.
        dtype: of its floating parameters. It is initialised in fp32 whatever this is.
        seed: of the initialisation, which depends neither on device nor on dtype.

    Raises:
        ConfigError: an unknown `type`, or a config that is not consistent.
        CheckpointError: the weights are missing, damaged, or of another model.
        SetupError: it needs an extra that is not installed, or a file that the hub does not give.
    """
    section = config if isinstance(config, Section) else _section(config)
    entry = _entry(str(getattr(section, "type", None)))
    module, _, name = entry.network.partition(":")
    network_class = getattr(importlib.import_module(module), name)
    device = torch.device(device)
    if entry.loads_itself:
        return network_class(section, device=device, dtype=dtype)
    with torch.device("meta"):
        network: nn.Module = network_class(section)
    if device.type == "meta":
        return network.to(dtype)
    network = _materialise(network, network_class, section, seed)
    weights = getattr(section, "from_pretrained", None)
    if weights:
        strict = bool(getattr(section, "strict_load", True))
        load_weights(network, weights, strict)
        if hasattr(network, "settle_pretrained"):
            network.settle_pretrained()  # type: ignore[operator]
    return network.to(device=device, dtype=dtype)


def _materialise(network: nn.Module, network_class: Any, section: Section, seed: int) -> nn.Module:
    if any(True for _ in network.buffers()):
        with torch.random.fork_rng(devices=[]):
            network = network_class(section)  # buffers carry values that only the constructor knows
    else:
        network = network.to_empty(device="cpu")
    network.reset_parameters(seed)  # type: ignore[operator]
    return network


def _section(config: Mapping[str, Any]) -> Section:
    kind = str(config.get("type"))
    try:
        return _entry(kind).section.model_validate(dict(config))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"the config of model `{kind}` is wrong: {faults}") from error


def _entry(kind: str) -> _Entry:
    if kind not in REGISTRY:
        near = difflib.get_close_matches(kind, REGISTRY, n=1)
        raise ConfigError(
            f"model type `{kind}` is not known",
            where="type",
            allowed=", ".join(REGISTRY),
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    return REGISTRY[kind]
