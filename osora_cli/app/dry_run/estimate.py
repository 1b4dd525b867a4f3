"""Device memory and checkpoint size of a training, from its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from osora_cli.app.dry_run.live_memory import LiveMemory, fused_attention
from osora_cli.app.dry_run.meta_engine import NetworkSize
from osora_cli.app.dry_run.probes import Probe
from osora_cli.app.dry_run.shapes import Shape
from osora_cli.config.schema import TrainConfig
from osora_cli.model.dc_ae import kernels

GIB = 2**30
# Workspaces of cuDNN and cuBLAS, which the trace does not see, and CUDA's own context, are about as much. The totals
# lie within 10 % of what was measured on an H200 (tests/unit/app/test_dry_run.py).
WORKSPACE_SHARE = 0.05
# What the device holds, by kind, in words.
KINDS = {
    "weights": "weights",
    "masters": "fp32 copies of them",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "ema": "average of weights",
    "frozen": "networks that are not trained",
    "activations": "activations",
    "workspaces": "workspaces, about",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at a step's most, by kind, and bytes of one checkpoint."""

    shape: Shape
    weights: int
    masters: int
    gradients: int
    optimizer: int
    ema: int
    frozen: int
    activations: int
    workspaces: int
    checkpoint: int
    save_buffers: int

    @property
    def total(self) -> int:
        """Of the device; save buffers lie in the host's memory."""
        return sum(getattr(self, kind) for kind in KINDS)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def estimate(probe: Probe, config: TrainConfig, shapes: Sequence[Shape], ranks: int = 1) -> MemoryEstimate:
    """The memory of that of `shapes` that takes the most, on one of `ranks` GPUs."""
    sizes = [network.size(name) for name, network in zip(probe.names, probe.engine.trained, strict=True)]
    gradients = sum(s.gradients for s in sizes)
    peaks = {shape: activation_peak(probe, shape, gradients) for shape in shapes}
    largest = max(peaks, key=peaks.__getitem__)
    activations = peaks[largest]
    split = _split(config.plugin, ranks)
    ema = 0 if config.ema_decay is None else 4 * sizes[0].trained
    parts = {
        "weights": sum(s.weights for s in sizes) // split["weights"],
        "masters": sum(s.masters for s in sizes) // split["masters"],
        "gradients": gradients // split["gradients"],
        "optimizer": sum(s.moments for s in sizes) // split["optimizer"],
        "ema": ema // split["optimizer"],
    }
    checkpoint = checkpoint_bytes(config, sizes)
    return MemoryEstimate(
        shape=largest,
        **parts,
        frozen=sum(probe.frozen.values()),
        activations=activations,
        workspaces=int(WORKSPACE_SHARE * activations),
        checkpoint=checkpoint,
        save_buffers=min(checkpoint // ranks, int(config.async_io_buffer_gib * GIB)) if config.async_io else 0,
    )


def activation_peak(probe: Probe, shape: Shape, gradients: int) -> int:
    """Most bytes that a step's passes hold beyond the networks and their gradients, on one rank."""
    *before, last = (max(0, peak - gradients) for peak in traced_peaks(probe, shape))
    return max(*before, last // probe.sequence_ranks, 0)


def traced_peaks(probe: Probe, shape: Shape) -> list[int]:
    """Most bytes that each of a step's passes holds beyond the networks: activations, gradients, what is in between."""
    peaks = []
    for one in probe.passes:
        for network in probe.engine.trained:
            network.drop_gradients()
        with kernels.planning(), fused_attention(), LiveMemory(probe.known()) as memory:
            one(shape)
        peaks.append(memory.peak)
    return peaks


def checkpoint_bytes(config: TrainConfig, sizes: Sequence[NetworkSize]) -> int:
    """Weights, fp32 masters, moments and average, as a checkpoint holds them."""
    total = sum(s.weights + s.moments for s in sizes)
    if config.save_master_weights:
        total += sum(s.masters for s in sizes)
    return total + (0 if config.ema_decay is None else 4 * sizes[0].trained)


def _split(plugin: str, ranks: int) -> dict[str, int]:
    """Among how many GPUs each kind is shared."""
    level = {"zero1": 1, "zero2": 2, "zero3": 3, "hybrid": 2}.get(plugin, 0)
    return {
        "weights": ranks if level >= 3 else 1,
        "gradients": ranks if level >= 2 else 1,
        "masters": ranks if level >= 1 else 1,
        "optimizer": ranks if level >= 1 else 1,
    }
