"""The sections `t5` and `clip`: text embedders, whose output conditions the diffusion transformer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from osora_cli.config.base import Int, Section

Kind = Literal["t5", "clip", "hashed_ngrams"]

# What `max_length: null` stands for. The released video weights were trained with 512 tokens of T5 and 77 of CLIP.
DEFAULT_MAX_LENGTH: dict[Kind, int] = {"t5": 512, "clip": 77, "hashed_ngrams": 77}


class TextEmbedderConfig(Section):
    """A frozen T5 or CLIP text encoder, or built-in hashed n-grams, which need no weights and know no meaning."""

    type: Literal["text_embedder"] = "text_embedder"
    kind: Literal["auto", "t5", "clip", "hashed_ngrams"] = Field(
        "auto", description="auto: t5 or clip, as the config.json beside the weights says"
    )
    from_pretrained: str | None = Field(
        None, description="folder with weights and tokenizer as transformers writes it, or hf://org/repo"
    )
    cache_dir: str | None = Field(None, description="folder for files of the hub; null: the hub client's own")
    max_length: Int | None = Field(
        None, ge=2, description="text tokens, longer texts are cut; null: 512 (t5) or 77 (clip, hashed_ngrams)"
    )
    width: Int | None = Field(
        None, ge=1, description="of hashed_ngrams: the model's context_in_dim or vec_in_dim; others bring their own"
    )
    shardformer: bool = Field(False, description="Open-Sora's key for fused T5 kernels; the numbers are the same")

    @field_validator("from_pretrained")
    @classmethod
    def _weights_where_needed(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if kind == "hashed_ngrams" and value is not None:
            raise ValueError(f"`{value}` cannot be used: kind hashed_ngrams has no weights; use null, or another kind")
        if kind in ("auto", "t5", "clip") and value is None:
            raise ValueError(
                f"kind {kind} needs a folder with weights or hf://org/repo; kind hashed_ngrams needs none, for demos"
            )
        return value

    @field_validator("width")
    @classmethod
    def _width_where_needed(cls, value: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("kind")
        if kind == "hashed_ngrams" and value is None:
            raise ValueError("kind hashed_ngrams needs one: the model's context_in_dim (tokens) or vec_in_dim (pooled)")
        if kind in ("auto", "t5", "clip") and value is not None:
            raise ValueError(f"`{value}` cannot be used: the width of {kind} comes with its weights; use null")
        return value
