"""T5 and CLIP text encoders through transformers, the extra `text`, which is imported when one is loaded.

As the released video weights were trained: texts are padded to a fixed length and no attention mask is
passed, so that padding takes part in T5; CLIP is causal, so that its padding comes too late to matter.

Shapes: B texts, L tokens, C channels.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osora_cli.config.models.text import DEFAULT_MAX_LENGTH, Kind, TextEmbedderConfig
from osora_cli.errors import CheckpointError, ConfigError, SetupError
from osora_cli.model.text import FrozenTextEmbedder, TextEmbedding
from osora_cli.model.weights import HUB

INSTALL_COMMAND = "python -m pip install 'osora[text]'"

# `model_type` of a config.json -> kind. "clip" is the whole CLIP, of which the text half is taken.
_KINDS: dict[str, Kind] = {"t5": "t5", "clip": "clip", "clip_text_model": "clip"}
_CLASSES: dict[Kind, tuple[str, str]] = {
    "t5": ("T5EncoderModel", "T5Tokenizer"),
    "clip": ("CLIPTextModel", "CLIPTokenizer"),
}


class _EncoderEmbedder(FrozenTextEmbedder):
    """An encoder with its tokenizer."""

    def __init__(
        self, encoder: nn.Module, tokenizer: Any, max_length: int, width: int, pooled_width: int | None
    ) -> None:
        super().__init__(max_length, width, pooled_width)
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.requires_grad_(False)
        self.train(False)

    def token_ids(self, texts: list[str], length: int) -> Tensor:
        """Ids `[B, length]`: cut at `max_length` with the end token kept, then padding on the right."""
        ids_BL = self.tokenizer(
            texts, max_length=self.max_length, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        padded_BL = F.pad(ids_BL, (0, length - self.max_length), value=self.tokenizer.pad_token_id)
        return padded_BL.to(next(self.encoder.parameters()).device)

    def _encode(self, texts: list[str], length: int) -> Any:
        ids_BL = self.token_ids(texts, length)
        # The encoder's dtype is its own affair: a caller's autocast would change what `osora data cache` has stored.
        with torch.autocast(ids_BL.device.type, enabled=False):
            return self.encoder(input_ids=ids_BL)


class T5TextEmbedder(_EncoderEmbedder):
    """A T5 encoder: its last hidden state as tokens, padding attended to; no pooled vector."""

    def __init__(self, encoder: nn.Module, tokenizer: Any, max_length: int) -> None:
        width = int(encoder.config.d_model)  # type: ignore[union-attr, arg-type]
        super().__init__(encoder, tokenizer, max_length, width, None)

    def _embed(self, texts: list[str], length: int) -> TextEmbedding:
        return TextEmbedding(self._encode(texts, length).last_hidden_state, None)


class ClipTextEmbedder(_EncoderEmbedder):
    """CLIP's text half: the normed last hidden state as tokens, and that of the first end token as pooled vector."""

    extensible = False  # it has learned positions, and no more than it was trained with

    def __init__(self, encoder: nn.Module, tokenizer: Any, max_length: int) -> None:
        width = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        super().__init__(encoder, tokenizer, max_length, width, width)

    def _embed(self, texts: list[str], length: int) -> TextEmbedding:
        output = self._encode(texts, length)
        return TextEmbedding(output.last_hidden_state, output.pooler_output)


def load_text_encoder(
    section: TextEmbedderConfig, *, device: torch.device, dtype: torch.dtype
) -> T5TextEmbedder | ClipTextEmbedder:
    """Load encoder and tokenizer from a local folder, or from the hub when the path begins with `hf://`.

    On the device "meta" the encoder has shapes only. The weights are read in `dtype`, never held in fp32 first.

    Raises: as `build_text_embedder`.
    """
    transformers = _transformers()
    path = str(section.from_pretrained)
    source, where = _source(path, section.cache_dir)
    with _told(path), _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(source, **where)
    kind = _kind(section, str(config.model_type))
    config = getattr(config, "text_config", config) if kind == "clip" else config
    max_length = _max_length(section, kind, config)
    model_class, tokenizer_class = (getattr(transformers, name) for name in _CLASSES[kind])
    with _told(path), _quiet(transformers):
        # `legacy` is how the prompts were cut into T5 tokens when the released weights were trained.
        options: dict[str, Any] = {"legacy": True} if kind == "t5" else {}
        tokenizer = tokenizer_class.from_pretrained(
            source, padding_side="right", truncation_side="right", **options, **where
        )
        _check_tokenizer(path, len(tokenizer), int(config.vocab_size))
        if device.type == "meta":
            with torch.device("meta"):
                encoder = model_class(config).to(dtype)
        else:
            options = {_dtype_key(transformers): dtype, "output_loading_info": True}
            encoder, info = model_class.from_pretrained(source, **options, **where)
            _check_complete(path, info["missing_keys"])
    embedder_class = T5TextEmbedder if kind == "t5" else ClipTextEmbedder
    return embedder_class(encoder, tokenizer, max_length).to(device)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SetupError(
            "T5 and CLIP text embedders need transformers, which is not installed", hint=INSTALL_COMMAND
        ) from error


def _dtype_key(transformers: Any) -> str:
    return "torch_dtype" if int(transformers.__version__.split(".")[0]) < 5 else "dtype"


def _source(path: str, cache_dir: str | None) -> tuple[str, dict[str, Any]]:
    """What transformers is to load from, and its arguments that say where that is."""
    if path.startswith(HUB):
        repo = path[len(HUB) :]
        if re.fullmatch(r"[^/]+/[^/]+", repo) is None:
            raise CheckpointError(f"`{path}` names no repository of the hub", allowed="hf://org/repo")
        return repo, {"cache_dir": cache_dir}
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        lacks = "is no folder" if not folder.is_dir() else "has no config.json"
        looks_like_repo = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None
        raise CheckpointError(
            f"`{path}` {lacks}",
            where="from_pretrained",
            allowed="a folder as transformers writes it (config.json, weights, tokenizer), or hf://org/repo",
            hint=f"hf://{path} takes it from the hub" if looks_like_repo else None,
        )
    return str(folder), {"local_files_only": True}


def _kind(section: TextEmbedderConfig, model_type: str) -> Kind:
    kind = _KINDS.get(model_type)
    if kind is None or section.kind not in ("auto", kind):
        raise ConfigError(
            f"`{section.from_pretrained}` is a model of type `{model_type}`"
            + ("" if section.kind == "auto" else f", not `{section.kind}`"),
            where="from_pretrained",
            allowed=", ".join(_KINDS) if section.kind == "auto" else section.kind,
            hint=f"kind: {kind}" if kind else None,
        )
    return kind


def _max_length(section: TextEmbedderConfig, kind: Kind, config: Any) -> int:
    length = section.max_length or DEFAULT_MAX_LENGTH[kind]
    if kind == "clip" and length > config.max_position_embeddings:
        raise ConfigError(
            f"max_length `{length}` is more than the {config.max_position_embeddings} positions of this CLIP",
            where="max_length",
            allowed=f"2 to {config.max_position_embeddings}",
        )
    return length


def _check_tokenizer(path: str, tokens: int, vocabulary: int) -> None:
    # Without its files transformers 5 makes a tokenizer of special tokens alone, and every word becomes "unknown". A
    # tokenizer with more tokens than the encoder has would index out of the embedding.
    if not vocabulary / 2 < tokens <= vocabulary:
        raise CheckpointError(
            f"the tokenizer in `{path}` has `{tokens}` tokens, the encoder beside it {vocabulary}",
            where="from_pretrained",
            hint="put the tokenizer's own files beside the weights: tokenizer.json; spiece.model for T5; "
            "vocab.json and merges.txt for CLIP",
        )


def _check_complete(path: str, missing: Any) -> None:
    # transformers initialises at random what a file lacks, and goes on.
    if missing:
        keys = "\n".join(f"  {key}" for key in sorted(missing))
        raise CheckpointError(
            f"the weights in `{path}` lack {len(missing)} tensors of the encoder:\n{keys}", where="from_pretrained"
        )


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Turn what transformers raises into osora's errors."""
    try:
        yield
    except CheckpointError:
        raise
    except ImportError as error:
        raise SetupError(
            f"`{path}` needs a package that is not installed: {_reason(error)}", hint=INSTALL_COMMAND
        ) from error
    # Errors of safetensors, tokenizers, the hub's client, JSON and OSError come as they are.
    except Exception as error:
        if path.startswith(HUB):
            raise SetupError(
                f"the hub did not give `{path}`: {_reason(error)}",
                hint="fetch it where there is a network, and name the local folder in from_pretrained",
            ) from error
        raise CheckpointError(
            f"`{path}` cannot be loaded as a text encoder: {_reason(error)}", where="from_pretrained"
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bars and reports of transformers: what matters of them is checked here and said in osora's words."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
