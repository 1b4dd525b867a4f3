"""A text embedder by its section of the config."""

from __future__ import annotations

import torch

from osora_cli.config.models.text import DEFAULT_MAX_LENGTH, TextEmbedderConfig
from osora_cli.model.text import FrozenTextEmbedder
from osora_cli.model.text_hashed import HashedNgramEmbedder
from osora_cli.model.text_pretrained import load_text_encoder


def build_text_embedder(section: TextEmbedderConfig, *, device: torch.device, dtype: torch.dtype) -> FrozenTextEmbedder:
    """The embedder that `section` describes, with its weights, unless `device` is "meta".

    Raises:
        ConfigError: the weights are of another kind, or have fewer positions than `max_length`.
        CheckpointError: the weights or the tokenizer are missing, incomplete or damaged.
        SetupError: the extra `text` is not installed, or the hub does not give the files.
    """
    if section.kind == "hashed_ngrams":
        assert section.width is not None  # the section demands it for this kind
        length = section.max_length or DEFAULT_MAX_LENGTH["hashed_ngrams"]
        return HashedNgramEmbedder(section.width, length).to(device=device, dtype=dtype)
    return load_text_encoder(section, device=device, dtype=dtype)
