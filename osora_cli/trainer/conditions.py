"""Visual conditions: which frames of a clip the model is shown while it learns to make the rest.

Kinds: `t2v` shows nothing, `i2v_head`, `i2v_tail` and `i2v_loop` the first frame, the last or both, `v2v_head` and
`v2v_tail` the clip's first or last 32 frames, their `_easy` forms 64. A causal autoencoder has one more frame in each
part, and encodes the part by itself, for it cannot know what comes before; of another's latent v2v takes a slice.

Shapes: B batch, C channels, T frames, H rows, W columns of latents; N pieces of clips.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from osora_cli.data.cached_batch import Part

TEXT_ONLY = "t2v"
_IMAGES: dict[str, tuple[Part, ...]] = {
    TEXT_ONLY: (),
    "i2v_head": (("head", 1),),
    "i2v_tail": (("tail", 1),),
    "i2v_loop": (("head", 1), ("tail", 1)),
}
# Frames of the part that is shown, without the first of a causal autoencoder.
_VIDEOS = {"v2v_head": 32, "v2v_tail": 32, "v2v_head_easy": 64, "v2v_tail_easy": 64}
KINDS = (*_IMAGES, *_VIDEOS)


@dataclass(frozen=True)
class LatentRules:
    """How an autoencoder counts time: frames of a latent frame, and whether the first is one by itself."""

    time_ratio: int
    causal: bool

    def frames(self, pixels_frames: int) -> int:
        """Latent frames of so many frames."""
        return (pixels_frames - 1) // self.time_ratio + 1


class ClipParts(Protocol):
    """Where latents of parts of clips come from: pixels that are encoded now, or a cache."""

    def latents(self, wanted: Sequence[tuple[int, Part]]) -> list[Tensor]:
        """Latents `[C, t, H, W]` of parts of the batch's clips, each a clip's index and its part."""


def parts_of(kind: str, rules: LatentRules) -> tuple[Part, ...]:
    """The parts of a clip that a kind shows, in frames."""
    if kind in _IMAGES:
        return _IMAGES[kind]
    side = "head" if "head" in kind else "tail"
    return ((side, _VIDEOS[kind] + rules.causal),)  # type: ignore[return-value]


def encoded_parts(weights: Mapping[str, float], rules: LatentRules) -> list[Part]:
    """The parts that have to be encoded by themselves for these kinds: what a cache of latents must hold beside."""
    found = {
        part: None
        for kind, weight in weights.items()
        if weight > 0
        for part in parts_of(kind, rules)
        if not _is_slice(part, rules)
    }
    return list(found)


def possible_kinds(weights: Mapping[str, float], latent_frames: int, rules: LatentRules) -> dict[str, float]:
    """The kinds that leave something to make of a clip so long; a new mapping. None: text only.

    An image has none. A kind needs a clip longer than all the parts that it shows.
    """
    if latent_frames == 1:
        return {TEXT_ONLY: 1.0}
    kept = {
        kind: weight
        for kind, weight in weights.items()
        if weight > 0 and latent_frames > sum(rules.frames(frames) for _, frames in parts_of(kind, rules))
    }
    return kept or {TEXT_ONLY: 1.0}


def draw_kinds(
    weights: Mapping[str, float], batch: int, latent_frames: int, rules: LatentRules, rng: random.Random
) -> list[str]:
    """A kind for each clip of a batch, drawn by weight."""
    if latent_frames == 1:
        return [TEXT_ONLY] * batch
    possible = possible_kinds(weights, latent_frames, rules)
    names, shares = list(possible), list(possible.values())
    return [rng.choices(names, shares)[0] for _ in range(batch)]


def make_condition(kinds: Sequence[str], z_BCTHW: Tensor, parts: ClipParts, rules: LatentRules) -> Tensor:
    """Mask and masked latent `[B, 1 + C, T, H, W]`: what is shown of each clip, and zeros.

    Args:
        kinds: of each clip.
        z_BCTHW: latents of the whole clips.
        parts: gives latents of what is encoded by itself.
    """
    cond_BCTHW = torch.zeros_like(torch.cat([z_BCTHW[:, :1], z_BCTHW], dim=1))
    length = z_BCTHW.shape[2]
    wanted: list[tuple[int, Part]] = []
    for index, kind in enumerate(kinds):
        for part in parts_of(kind, rules):
            place = _place(part, length, rules)
            cond_BCTHW[index, 0, place] = 1
            if _is_slice(part, rules):
                cond_BCTHW[index, 1:, place] = z_BCTHW[index, :, place]
            else:
                wanted.append((index, part))
    for (index, part), latent_CTHW in zip(wanted, parts.latents(wanted) if wanted else [], strict=True):
        cond_BCTHW[index, 1:, _place(part, length, rules)] = latent_CTHW.to(cond_BCTHW)
    return cond_BCTHW


def _place(part: Part, length: int, rules: LatentRules) -> slice:
    """Where a part lies in the latent of the whole clip."""
    side, frames = part
    count = rules.frames(frames)
    return slice(0, count) if side == "head" else slice(length - count, length)


def _is_slice(part: Part, rules: LatentRules) -> bool:
    """Whether a part's latent is cut out of the whole clip's, rather than encoded by itself."""
    return part[1] > 1 and not rules.causal


class PixelParts:
    """Parts of clips at hand as pixels, encoded together where they are equally long.

    Args:
        video: pixels [B, 3, T, H, W] in [-1, 1].
        encode: pixels [N, 3, t, H, W] to latents.
    """

    def __init__(self, video: Tensor, encode: Callable[[Tensor], Tensor]) -> None:
        self._video = video
        self._encode = encode

    def latents(self, wanted: Sequence[tuple[int, Part]]) -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for frames in dict.fromkeys(part[1] for _, part in wanted):
            places = [n for n, (_, part) in enumerate(wanted) if part[1] == frames]
            pieces = [self._piece(*wanted[n]) for n in places]
            out.update(zip(places, self._encode(torch.stack(pieces)), strict=True))
        return [out[n] for n in range(len(wanted))]

    def _piece(self, index: int, part: Part) -> Tensor:
        side, frames = part
        clip = self._video[index]
        return clip[:, :frames] if side == "head" else clip[:, clip.shape[1] - frames :]


class CachedParts:
    """Parts of clips whose latents were made before.

    Args:
        latents: `[B, C, t, H, W]` by part.
    """

    def __init__(self, latents: Mapping[Part, Tensor]) -> None:
        self._latents = latents

    def latents(self, wanted: Sequence[tuple[int, Part]]) -> list[Tensor]:
        return [self._latents[part][index] for index, part in wanted]
