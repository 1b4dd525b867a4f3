"""Device memory and checkpoint size of a training, from its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from osora_cli.app.dry_run.live_memory import LiveMemory
from osora_cli.app.dry_run.meta_engine import NetworkSize
from osora_cli.app.dry_run.probes import Probe, Shape
from osora_cli.config.schema import TrainConfig

GIB = 2**30
# Workspaces of cuDNN and cuBLAS, which the trace does not see. Chosen by one measurement: dc-ae-f32t4c128, first stage,
# clips only, on an H200, where torch held 49.0 GiB and this gives 48.4. CUDA's own context is not in either.
WORKSPACE_SHARE = 0.05


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
        return (
            self.weights + self.masters + self.gradients + self.optimizer + self.ema + self.frozen
            + self.activations + self.workspaces
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def estimate(probe: Probe, config: TrainConfig, shapes: Sequence[Shape], ranks: int = 1) -> MemoryEstimate:
    """The memory of the largest of `shapes`, on one of `ranks` GPUs."""
    sizes = [network.size(name) for name, network in zip(probe.names, probe.engine.trained, strict=True)]
    largest = max(shapes, key=lambda shape: shape.positions)
    peak = traced_peak(probe, largest)
    split = _split(config.plugin, ranks)
    gradients = sum(s.gradients for s in sizes)
    ema = 0 if config.ema_decay is None else 4 * sizes[0].trained
    activations = max(0, peak - gradients)
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


def traced_peak(probe: Probe, shape: Shape) -> int:
    """Most bytes that a step's passes hold beyond the networks: activations, gradients and what is in between."""
    peak = 0
    for one in probe.passes:
        with LiveMemory(probe.known()) as memory:
            one(shape)
        peak = max(peak, memory.peak)
    return peak


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
