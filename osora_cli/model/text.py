"""Text embedders: what they all give, and how texts are padded.

Shapes: B texts, L text tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TextEmbedding:
    """Embedded texts, on the embedder's device and in its dtype, without gradient.

    Attributes:
        tokens: `[B, L, C]`, one vector a token, those of the padding included: nothing masks them later.
        pooled: `[B, C]`, one vector a text; None for T5, which has none.
    """

    tokens: Tensor
    pooled: Tensor | None


@runtime_checkable
class TextEmbedder(Protocol):
    """What every text embedder offers.

    Attributes:
        max_length: tokens that a text is cut or padded to.
        token_width: channels of `tokens` (a diffusion model's `context_in_dim`).
        pooled_width: channels of `pooled` (its `vec_in_dim`); None: there is no pooled vector.
    """

    max_length: int
    token_width: int
    pooled_width: int | None

    def embed(self, texts: Sequence[str], *, length: int | None = None) -> TextEmbedding:
        """Embed texts as they are given; "" is a text like any other.

        Args:
            texts: at least one.
            length: tokens a text is padded to, from `max_length` (what None means) up. See `padded_length`.

        Raises:
            TypeError: something else than text is among them, or one text is given in place of several.
            ValueError: there are none, or the length is one that the embedder does not have.
        """

    def null(self, batch_size: int = 1, *, length: int | None = None) -> TextEmbedding:
        """The embedding of "", which stands for no text, repeated over a batch.

        It costs a run of the encoder each time, so keep it; the batch is a view of one. With a `length` above
        `max_length` the tokens are extended by repeating the last one: no further padding is encoded. This length is
        free for every embedder.

        Raises:
            ValueError: `length` is below `max_length`.
        """


def padded_length(text_tokens: int, image_tokens: int, sp_size: int) -> int:
    """The least number of text tokens, from `text_tokens` up, with which text and image divide over `sp_size` ranks."""
    return text_tokens + -(text_tokens + image_tokens) % sp_size


def extend_tokens(tokens_BLC: Tensor, length: int) -> Tensor:
    """`[B, length, C]`: longer by repeats of the last position.

    Raises:
        ValueError: `length` is below L.
    """
    extra = length - tokens_BLC.shape[1]
    if extra < 0:
        raise ValueError(f"`{tokens_BLC.shape[1]}` tokens cannot be extended to `{length}`")
    return torch.cat([tokens_BLC, tokens_BLC[:, -1:].expand(-1, extra, -1)], dim=1)


class FrozenTextEmbedder(nn.Module):
    """What the embedders share: arguments are checked, nothing is trained, and dropout stays off.

    Args:
        max_length, token_width, pooled_width: as in `TextEmbedder`.
    """

    extensible: ClassVar[bool] = True  # whether texts can be padded beyond `max_length`

    def __init__(self, max_length: int, token_width: int, pooled_width: int | None) -> None:
        super().__init__()
        self.max_length = max_length
        self.token_width = token_width
        self.pooled_width = pooled_width

    def embed(self, texts: Sequence[str], *, length: int | None = None) -> TextEmbedding:
        """See `TextEmbedder.embed`."""
        _check_texts(texts)
        length = self.max_length if length is None else length
        if length < self.max_length or (length > self.max_length and not self.extensible):
            bound = "at least " if self.extensible else ""
            raise ValueError(f"texts cannot be padded to `{length}` tokens: it must be {bound}{self.max_length}")
        # no_grad and not inference_mode: the diffusion model's backward saves these tensors.
        with torch.no_grad():
            return self._embed(list(texts), length)

    def null(self, batch_size: int = 1, *, length: int | None = None) -> TextEmbedding:
        """See `TextEmbedder.null`."""
        one = self.embed([""])
        tokens_BLC = extend_tokens(one.tokens, self.max_length if length is None else length)
        pooled_BC = None if one.pooled is None else one.pooled.expand(batch_size, -1)
        return TextEmbedding(tokens_BLC.expand(batch_size, -1, -1), pooled_BC)

    def train(self, mode: bool = True) -> FrozenTextEmbedder:
        """Has no effect: a frozen encoder stays in eval mode, also as a part of a network in training."""
        del mode
        return super().train(False)

    def _embed(self, texts: list[str], length: int) -> TextEmbedding:
        raise NotImplementedError


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TypeError("one text is given where several are expected: embed([text])")
    if len(texts) == 0:
        raise ValueError("there are no texts to embed")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text {index} is `{text!r}`, of type {type(text).__name__}")
