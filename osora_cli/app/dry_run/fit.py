"""Whether a training fits the GPU, worked out before its networks are made."""

from __future__ import annotations

import torch

from osora_cli.app.dry_run.estimate import GIB, KINDS, MemoryEstimate, estimate
from osora_cli.app.dry_run.probes import make_probe
from osora_cli.app.dry_run.shapes import batch_shapes, filled_buckets
from osora_cli.app.training import Training
from osora_cli.config.schema import TrainConfig


def device_bytes(device: torch.device) -> int | None:
    """Memory of the GPU that a process trains on; None: on the CPU, whose memory is not looked at."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def fit_warning(command: str, training: Training, ranks: int, available: int | None) -> str | None:
    """What to say of a training that the GPU is estimated not to hold; None: it fits, or there is no GPU.

    Nothing is computed and no weights are made: a step is traced on the meta device, which takes 4 to 8 s of one core
    for the presets.

    Args:
        ranks: GPUs that the run has.
        available: memory of one, bytes.
    """
    shapes = batch_shapes(training.config, filled_buckets(training.report))
    if available is None or not shapes:
        return None
    memory = estimate(make_probe(command, training.config), training.config, shapes, ranks)
    return memory_fault(memory, training.config, ranks, available)


def memory_fault(memory: MemoryEstimate, config: TrainConfig, ranks: int, available: int | None) -> str | None:
    """The estimate by kind, what the GPU has, and what would help; None where it fits or there is no GPU."""
    if available is None or memory.total <= available:
        return None
    parts = memory.to_json()
    held = ", ".join(f"{label} {parts[kind] / GIB:.1f}" for kind, label in KINDS.items() if parts[kind] >= GIB / 20)
    shape, cures = memory.shape, _cures(memory, config, ranks)
    return (
        f"a step of {shape.clips} x {shape.frames} frames of {shape.height}x{shape.width} px is estimated to take "
        f"{memory.total / GIB:.1f} GiB and the GPU has {available / GIB:.1f} GiB ({held}): {cures}"
    )


def _cures(memory: MemoryEstimate, config: TrainConfig, ranks: int) -> str:
    """What there is left to do, the cheapest first."""
    cures = []
    if not config.grad_checkpoint:
        cures.append("`--grad-checkpoint`")
    if config.dtype == "fp32":
        cures.append("`--dtype bf16`")
    one = memory.shape.clips == 1
    cures.append(
        "a smaller or shorter bucket in `bucket_config`" if one else "a smaller batch or bucket in `bucket_config`"
    )
    if ranks == 1:
        cures.append("more GPUs with `--plugin zero2`")
    elif config.plugin in ("none", "ddp", "zero1"):
        cures.append("`--plugin zero2`, which shares gradients, fp32 copies and optimizer")
    elif config.plugin == "zero2":
        cures.append("`--plugin zero3`, which shares the weights as well")
    else:
        cures.append("more GPUs")
    return ", or ".join([", ".join(cures[:-1]), cures[-1]])
