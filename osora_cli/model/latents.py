"""What training, evaluation, sampling and the cache of latents share: pixels to latents, texts to embeddings, and the
model's forward from both.

Shapes: B batch, C channels, T frames, H rows, W columns (of pixels for `video`, of latents elsewhere); L text tokens,
P width of the pooled text vector.

Shared, so that all four see the same numbers: `encode_latents`, `TextBundle` with `embed_texts` and `null_text`,
`predict_velocity`. The networks come from app/frozen_parts.py (`build_frozen_parts`), the shift of time from
model/flow.py, and a batch whose latents or embeddings are read from disk is a `CachedBatch` (data/cached_batch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.hunyuan_vae.posterior import DiagonalGaussian
from osora_cli.model.mmdit.packing import make_tokens, pack, unpack
from osora_cli.model.text import TextEmbedder, extend_tokens


class Autoencoder(Protocol):
    """What the diffusion model needs of an autoencoder; the networks of model/dc_ae and model/hunyuan_vae are such.

    Attributes:
        is_causal: whether the first frame is a latent frame of its own, and no frame sees those after it.
        time_compression_ratio, spatial_compression_ratio: frames and pixels of a latent.
        latent_channels: of its latents.
    """

    is_causal: bool
    time_compression_ratio: int
    spatial_compression_ratio: int
    latent_channels: int

    def encode(self, x_BCTHW: Tensor, /) -> Tensor: ...

    def decode(self, z_BCTHW: Tensor, /) -> Tensor: ...

    def parameters(self) -> Any: ...


@dataclass(frozen=True)
class TextBundle:
    """Texts as the model takes them.

    Attributes:
        t5: text tokens `[B, L, C]`, padding included.
        clip: pooled vector `[B, P]`.
    """

    t5: Tensor
    clip: Tensor

    def __len__(self) -> int:
        return self.t5.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TextBundle:
        """The same on another device, or in another dtype; the host does not wait for what page-locked memory gives."""
        # To the host it has to: a copy that is under way there could be read before it is done.
        ahead = torch.device(device).type != "cpu"
        t5, clip = (value.to(device, dtype, non_blocking=ahead) for value in (self.t5, self.clip))
        return TextBundle(t5, clip)

    def extended(self, length: int) -> TextBundle:
        """With `length` text tokens, longer by repeats of the last one. Raises ValueError below L."""
        return self if length == self.t5.shape[1] else TextBundle(extend_tokens(self.t5, length), self.clip)


@dataclass(frozen=True)
class FrozenParts:
    """The networks that are used and not trained; None: not needed, because what it makes comes from a cache."""

    ae: Autoencoder | None
    t5: TextEmbedder | None
    clip: TextEmbedder | None


@torch.no_grad()
def encode_latents(
    ae: Autoencoder, video_BCTHW: Tensor, generator: torch.Generator | None = None, *, batch_size: int | None = None
) -> Tensor:
    """Latents of clips in the autoencoder's dtype: scaled, in tiles, and drawn from the posterior where it has one.

    Args:
        video_BCTHW: pixels in [-1, 1], on the autoencoder's device.
        generator: of the posterior's draw; None: its mean is taken.
        batch_size: clips encoded at a time, to bound memory; None: all. It does not change what is drawn.
    """
    dtype = next(iter(ae.parameters())).dtype
    chunks = video_BCTHW.to(dtype).split(batch_size or len(video_BCTHW))
    if not isinstance(ae, HunyuanVae):
        return torch.cat([ae.encode(chunk) for chunk in chunks])
    found = [ae.posterior(chunk) for chunk in chunks]
    posterior = DiagonalGaussian(torch.cat([p.mean for p in found]), torch.cat([p.logvar for p in found]))
    return ae.latents_of(posterior, sample_posterior=generator is not None, generator=generator)


def embed_texts(parts: FrozenParts, texts: Sequence[str], *, length: int | None = None) -> TextBundle:
    """Embed captions with both embedders.

    Args:
        length: text tokens after padding, from T5's `max_length` (what None means) up; see `padded_length`.

    Raises:
        ValueError: the parts were built without text embedders, or the length is one that T5 does not have.
    """
    if parts.t5 is None or parts.clip is None:
        raise ValueError("the text embedders were not built")
    pooled = parts.clip.embed(texts).pooled
    if pooled is None:
        raise ValueError("the embedder `clip` gives no pooled vector")
    return TextBundle(parts.t5.embed(texts, length=length).tokens, pooled)


def null_text(parts: FrozenParts) -> TextBundle:
    """The embedding of "" for one sample, which stands for no text. It costs a run of the encoders, so keep it."""
    return embed_texts(parts, [""])


def predict_velocity(
    model: nn.Module,
    x_t_BCTHW: Tensor,
    t_B: Tensor,
    text: TextBundle,
    cond_BCTHW: Tensor | None = None,
    guidance: float | Tensor | None = None,
    *,
    patch_size: int,
) -> Tensor:
    """The model's velocity `[B, C, T, H, W]` at noisy latents, in its own dtype.

    Args:
        model: an MMDiT, perhaps wrapped by an engine.
        x_t_BCTHW: noisy latents.
        t_B: time of each sample, 0 is data and 1 is noise; fp32.
        text: of one sample for all, or of each.
        cond_BCTHW: mask and masked latent `[B, 1 + C, T, H, W]`, for a model with `cond_embed`.
        guidance: strength for a model with `guidance_embed`: a number for all samples, or `[B]`.
        patch_size: edge of a patch of the model.

    Raises:
        ConfigError: rows or columns of the latent are no multiple of the patch.
        ValueError: inputs that the model's options do not fit.
    """
    tokens = make_tokens(x_t_BCTHW, text.t5, text.clip, patch_size)
    if isinstance(guidance, (int, float)):
        guidance = torch.full((len(x_t_BCTHW),), float(guidance), device=x_t_BCTHW.device)
    out_BNF = model(
        img=tokens.img,
        img_ids=tokens.img_ids,
        txt=tokens.txt,
        txt_ids=tokens.txt_ids,
        timesteps=t_B,
        y_vec=tokens.y_vec,
        cond=None if cond_BCTHW is None else pack(cond_BCTHW, patch_size),
        guidance=guidance,
    )
    return unpack(out_BNF, tokens.grid, patch_size)
