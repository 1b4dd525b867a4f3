"""How much of each clip an autoencoder is trained on: the whole clip, stills, or a shorter clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from osora_cli.data.draws import draw_rng
from osora_cli.trainer.task import StepContext


@dataclass(frozen=True)
class Mixing:
    """A rule of mixing.

    Attributes:
        strategy: `mixed_video_image`, `mixed_video_random`, or None for whole clips.
        image_ratio: share of micro-batches that are stills.
        rule: `balanced`: any rank may take stills, all frames of its clips as so many stills, which cost what the
            clips would (dc-ae-f32t4c128, 32 frames of 256x256: 73.3 against 71.6 TFLOP forward, activations 14 %
            more); shorter clips have one length on all ranks. So no rank waits for another. `open_sora`: the first
            rank takes clips only, the others one still of each clip, and each rank draws its own length.
        lengths: the clip lengths up to a given one that the network takes, ascending.
    """

    strategy: str | None
    image_ratio: float
    rule: str
    lengths: Callable[[int], list[int]]

    def apply(self, video: torch.Tensor, context: StepContext) -> torch.Tensor:
        """What this micro-batch is trained on, of clips [B, C, T, H, W]: [B, C, t, H, W], or stills [B*T, C, 1, H, W]
        under the balanced rule."""
        frames = video.shape[2]
        if self.strategy is None or frames == 1:
            return video
        if self.strategy == "mixed_video_random":
            return video[:, :, : self._length(frames, context)]
        if not self._takes_stills(context):
            return video
        if self.rule == "open_sora":
            return video[:, :, :1]
        return video.transpose(1, 2).flatten(0, 1).unsqueeze(2)

    def _takes_stills(self, context: StepContext) -> bool:
        if self.rule == "open_sora" and context.rank == 0:
            return False
        ratio = self.image_ratio
        if self.rule == "open_sora":
            ratio = modulated_ratio(ratio, context.world_size)
        return context.rng("mixed_video_image").random() < ratio

    def _length(self, frames: int, context: StepContext) -> int:
        if self.rule == "open_sora":
            return context.rng("mixed_video_random").choice(self.lengths(frames))
        rng = draw_rng(context.seed, "step", "mixed_video_random", context.update, context.micro)
        return rng.choice(self.lengths(frames))

    def notes(self, world_size: int) -> list[str]:
        """What a user should know once, at the start."""
        if self.strategy == "mixed_video_image" and self.rule == "open_sora" and world_size == 1:
            return [
                f"mixed_video_image by Open-Sora's rule: stills (ratio {self.image_ratio:g}) are taken by ranks other "
                "than the first; one process trains on clips only"
            ]
        return []


def modulated_ratio(ratio: float, world_size: int) -> float:
    """The ratio at which the other ranks draw stills where the first takes none, so that all together keep `ratio`.

    Above 1 where they cannot.
    """
    return ratio * world_size / (world_size - 1) if world_size > 1 else ratio
