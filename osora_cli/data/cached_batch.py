"""A batch whose latents, text embeddings, or both were made before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from osora_cli.data.loader import ClipBatch

Part = tuple[Literal["head", "tail"], int]
"""Frames at one end of a clip, and how many: `("head", 1)` is the first frame."""


@dataclass(frozen=True)
class CachedBatch(ClipBatch):
    """What a clip batch says, with tensors in place of pixels or texts. `video` is on the device "meta" when there are
    latents: it has the clips' shape and no pixels.

    Attributes:
        latents: [B, C, t, h, w] of the whole clips as the autoencoder gave them; None: `video` is encoded.
        parts: latents of parts of the clips encoded by themselves, for conditions, by part.
        t5: text tokens [B, L, C]; None, with `clip`: `texts` are embedded.
        clip: pooled text vectors [B, P].
    """

    latents: Tensor | None = None
    parts: Mapping[Part, Tensor] = field(default_factory=dict)
    t5: Tensor | None = None
    clip: Tensor | None = None
