"""What to tell a user of an autoencoder's clip lengths and sizes before hours are spent on them."""

from __future__ import annotations

from collections.abc import Sequence

from osora_cli.config.schema import TrainVaeConfig
from osora_cli.data.buckets import Bucket

# The temporal tile that long clips are cut into by default.
ADVISED_FRAMES = 32
# dc-ae-f32t4c128 in bf16 on one H200 (docs/performance.md): 39.8 GiB at 32 frames of 256x256 px, of which 9.4 are
# weights, masters, gradients, moments and average (22 bytes for each of 459 M parameters); with recomputation 33.2 at
# 96 frames and 41.6 at 512x512 px. What is not state goes with the number of pixels.
_MEASURED_MODEL = "dc-ae-f32t4c128"
_STATE_GIB = 9.4
_GIB_PER_MPIXEL = (39.8 - _STATE_GIB) / (32 * 256 * 256 / 1e6)
_GIB_PER_MPIXEL_RECOMPUTED = (41.6 - _STATE_GIB) / (32 * 512 * 512 / 1e6)
_COMMON_GPU_GIB = 80e9 / 2**30
WARNING = "warning: "


def advice(config: TrainVaeConfig, buckets: Sequence[Bucket]) -> list[str]:
    """Notes, each once; those that begin with `WARNING` are to be shown as such."""
    return [*_lengths(config, buckets), *_memory(config, buckets)]


def _lengths(config: TrainVaeConfig, buckets: Sequence[Bucket]) -> list[str]:
    if config.model.model_name is None:
        return []
    odd = sorted({b.frames for b in buckets if b.frames > 1 and b.frames % ADVISED_FRAMES})
    if not odd:
        return []
    return [
        f"clips of {', '.join(map(str, odd))} frames: possible, but multiples of {ADVISED_FRAMES} are advised, "
        "the length of the tiles that long clips are coded in"
    ]


def _memory(config: TrainVaeConfig, buckets: Sequence[Bucket]) -> list[str]:
    """A warning where activations will not fit a common GPU, and recomputing them would help."""
    if config.grad_checkpoint or config.dtype != "bf16" or config.model.model_name != _MEASURED_MODEL:
        return []
    largest = max(buckets, key=lambda b: b.pixels)
    kept, recomputed = (
        _STATE_GIB + per_mpixel * largest.pixels / 1e6 for per_mpixel in (_GIB_PER_MPIXEL, _GIB_PER_MPIXEL_RECOMPUTED)
    )
    if kept <= _COMMON_GPU_GIB:
        return []
    clips = f"{largest.batch_size} clip{'s' if largest.batch_size > 1 else ''}"
    return [
        f"{WARNING}grad_checkpoint is off: {clips} of {largest.frames} frames of {largest.height}x{largest.width} px "
        f"take about {kept:.0f} GiB of GPU memory; `--grad-checkpoint` needs about {recomputed:.0f} GiB and a third "
        "more time"
    ]
