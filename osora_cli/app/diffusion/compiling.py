"""Compiled blocks in a diffusion training: whether, for which shapes, and before the first update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from osora_cli.app.vae.advice import WARNING
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.autoencoder import compression, is_causal, latent_channels
from osora_cli.data.sampler import BucketSampler
from osora_cli.errors import SetupError
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.compiled import BlockCompiler, obstacle
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion import DiffusionTask

LatentSize = tuple[int, int, int, int, int]


@dataclass
class Compilation:
    """A model whose blocks are compiled.

    Attributes:
        sizes: latents `[B, C, T, H, W]` of the batches that are known ahead, the same on all ranks.
    """

    compiler: BlockCompiler
    model: MMDiT
    sizes: list[LatentSize]

    def ahead(self, task: DiffusionTask, world_size: int, tell: Callable[[str], None]) -> None:
        """Compile for all sizes, saying each; whatever is compiled afterwards is said as well.

        Where it fails, the blocks run as they are and `tell` says why.

        Raises:
            SetupError: it failed, and other ranks wait for this one in a collective.
        """
        began = time.perf_counter()
        for number, size in enumerate(self.sizes, 1):
            tell(f"compiling shape {number} of {len(self.sizes)}: latents {'x'.join(map(str, size))}")
            try:
                task.rehearse(size)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler's: of any kind
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                if world_size > 1:
                    raise SetupError(f"the blocks cannot be compiled: {why}", hint="--compile false") from error
                self.compiler.detach(self.model)
                task.rehearse(
                    size
                )  # drops what there is of a gradient; an error that is not the compiler's comes again
                tell(f"compile: the blocks run as they are, compiling them failed with {why}")
                return
        seconds, graphs = time.perf_counter() - began, len(self.compiler.graphs)
        tell(f"compiled {len(self.sizes)} shapes in {seconds:.1f} s ({graphs} graphs)")
        self.compiler.on_graph = lambda graph: tell(
            f"compiling {graph} tokens: not among the shapes known ahead, recompilation {self._later(graphs)}"
        )

    def _later(self, known: int) -> int:
        return len(self.compiler.graphs) - known


def compilation(
    config: TrainDiffusionConfig, model: MMDiT, sampler: BucketSampler, device: torch.device, notes: list[str]
) -> Compilation | None:
    """Have the blocks of `model` compiled if the config asks for it and it can be; None: they run as they are.

    Args:
        notes: why not is added here, where it was asked for.
    """
    if config.compile == "false" or (config.compile == "auto" and device.type != "cuda"):
        return None
    reason = obstacle(device)
    if config.plugin == "hybrid" and config.plugin_config.sp_size > 1:
        reason = "with `plugin_config.sp_size` above 1 attention is another one in each step"
    if reason is not None:
        asked = WARNING if config.compile == "true" else ""
        notes.append(f"{asked}compile: the blocks run as they are: {reason}")
        return None
    sizes = latent_sizes(config, sampler)
    compiler = BlockCompiler(deterministic=config.deterministic)
    compiler.attach(model, len(sizes))
    return Compilation(compiler, model, sizes)


def latent_sizes(config: TrainDiffusionConfig, sampler: BucketSampler) -> list[LatentSize]:
    """Latents of the batches of the first epoch, of all ranks, each size once; the smallest first."""
    order, channels = sampler.order(0), latent_channels(config.ae)
    (time_ratio, space), causal = compression(config.ae), is_causal(config.ae)
    found = set()
    for index in {int(bucket): number for number, bucket in enumerate(order.bucket_ids)}.values():
        batch = order.batch(index)
        frames = LatentRules(time_ratio, causal).frames(batch.frames)
        found.add((len(batch.rows), channels, frames, batch.height // space, batch.width // space))
    return sorted(found, key=lambda size: (size[0] * size[2] * size[3] * size[4], size))
