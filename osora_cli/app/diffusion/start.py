"""What a diffusion training starts from: its seed, released weights in their layouts, or a run's."""

from __future__ import annotations

import torch

from osora_cli.app.training import STARTING
from osora_cli.app.vae.start import StartWeights, find_start, load_start, told_start
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.flux import FluxConfig
from osora_cli.errors import CheckpointError, ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.host_buffer import HostBuffer
from osora_cli.model.weights import HUB, LoadReport, check_weights

_WHERE = "model.from_pretrained"


def check_model_start(config: TrainDiffusionConfig, notes: list[str]) -> StartWeights | None:
    """Find the weights that `model.from_pretrained` names, and see that they fit the model.

    Args:
        notes: what was found is added here.

    Raises:
        CheckpointError: nothing is there, nothing that verifies, or it is of another model.
        ConfigError: their rotary layout has to be said, and is not.
    """
    section = config.model
    if section.from_pretrained is None:
        return None
    start = find_start(section.from_pretrained, False, notes)
    if not start.source.startswith(HUB):  # what is on the hub is looked at when it is loaded
        check_fit(section, check_weights(build_model(unloaded(section), device="meta"), start.source), notes)
    notes.append(f"{STARTING}{told_start(start)}")
    return start


def check_fit(section: FluxConfig, report: LoadReport, notes: list[str]) -> None:
    """Whether weights may start the model; what is unusual about them goes to `notes`.

    Raises:
        CheckpointError: they do not fit, and are not meant to; or nothing of them does.
        ConfigError: see `check_model_start`.
    """
    if report.rearranged and section.pretrained_rope is None:
        have = "split" if section.fused_qkv else "fused"
        raise ConfigError(
            f"q, k and v are {have} in `{report.source}`, so it is not this model's own layout, and which channels of "
            "a head rotate together cannot be seen from the file",
            where=_WHERE,
            allowed="interleaved (FLUX.1) or half (Open-Sora)",
            hint=f"--model.pretrained-rope {'half' if section.fused_qkv else 'interleaved'}",
        )
    if not report.loaded or (section.strict_load and not report.fits):
        hint = "`--model.strict-load True` lists what is missing" if not section.strict_load else None
        raise CheckpointError(report.text(), where=_WHERE, hint=hint)
    if not report.fits:
        notes.append(f"{report.text()}\n  strict_load is false: what is missing starts from random values")
    if report.allowed_missing:
        notes.append(f"{', '.join(report.allowed_missing)} are not in the weights and start at zero")


def unloaded(section: FluxConfig) -> FluxConfig:
    """The section without weights."""
    return section.model_copy(update={"from_pretrained": None})


def model_section(config: TrainDiffusionConfig) -> FluxConfig:
    """The model's section without weights, with how many blocks are recomputed: its own say, or else the training's."""
    section = unloaded(config.model)
    if section.grad_ckpt_settings is not None:
        return section
    return section.model_copy(update={"grad_ckpt_settings": config.grad_ckpt_settings})


def build_mmdit(
    config: TrainDiffusionConfig, start: StartWeights | None, device: torch.device, notes: list[str]
) -> MMDiT:
    """The model in fp32 on the CPU, from its seed or from `start`, in its own layout, with recomputation as set.

    Args:
        device: where it will be trained.
    """
    module = build_model(model_section(config), device="cpu", seed=config.seed)
    assert isinstance(module, MMDiT)
    if start is not None:
        report = load_start(module, start, config.model.strict_load)
        if start.source.startswith(HUB):
            check_fit(config.model, report, notes)
        module.settle_pretrained()
    if config.grad_checkpoint:
        # On the host itself a buffer would only copy what is there already.
        buffered = config.grad_ckpt_buffer_size > 0 and device.type != "cpu"
        module.enable_grad_checkpoint(True, HostBuffer(config.grad_ckpt_buffer_size) if buffered else None)
    return module
