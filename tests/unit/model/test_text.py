"""What all text embedders share: the section's rules, padding over ranks, null embeddings, refusals."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from osora_cli.config.models.text import TextEmbedderConfig
from osora_cli.errors import ConfigError, SetupError
from osora_cli.model.build import build_model
from osora_cli.model.text import FrozenTextEmbedder, TextEmbedder, extend_tokens, padded_length


def hashed(**changes: Any) -> FrozenTextEmbedder:
    config = {"type": "text_embedder", "kind": "hashed_ngrams", "width": 16, "max_length": 8, **changes}
    model = build_model(config)
    assert isinstance(model, FrozenTextEmbedder)
    assert isinstance(model, TextEmbedder)
    return model


@pytest.mark.parametrize("text", [5, 77, 512])
@pytest.mark.parametrize("image", [0, 1, 33 * 16 * 16, 9999])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_text_and_image_divide_over_the_ranks(text: int, image: int, ranks: int) -> None:
    length = padded_length(text, image, ranks)
    assert (length + image) % ranks == 0
    assert 0 <= length - text < ranks


def test_extension_repeats_the_last_position() -> None:
    tokens = torch.arange(12.0).reshape(2, 3, 2)
    longer = extend_tokens(tokens, 5)
    assert torch.equal(longer[:, :3], tokens)
    assert torch.equal(longer[:, 3], tokens[:, 2])
    assert torch.equal(longer[:, 4], tokens[:, 2])
    assert torch.equal(extend_tokens(tokens, 3), tokens)
    with pytest.raises(ValueError, match="`3` tokens cannot be extended to `2`"):
        extend_tokens(tokens, 2)


def test_null_is_the_embedding_of_the_empty_text() -> None:
    embedder = hashed()
    one, null = embedder.embed([""]), embedder.null(3, length=11)
    assert one.pooled is not None
    assert null.pooled is not None
    assert null.tokens.shape == (3, 11, 16)
    for row in range(3):
        assert torch.equal(null.tokens[row], extend_tokens(one.tokens, 11)[0])
        assert torch.equal(null.pooled[row], one.pooled[0])
    with pytest.raises(ValueError, match="cannot be extended"):
        embedder.null(length=7)


@pytest.mark.parametrize(
    ("texts", "error", "told"),
    [
        ("one text", TypeError, r"embed\(\[text\]\)"),
        ([], ValueError, "no texts"),
        (["a", float("nan")], TypeError, "text 1 is `nan`, of type float"),
        ([None], TypeError, "text 0 is `None`"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(texts: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        hashed().embed(texts)


def test_a_length_below_max_length_is_refused() -> None:
    with pytest.raises(ValueError, match="padded to `7` tokens: it must be at least 8"):
        hashed().embed(["a"], length=7)


def test_the_seeds_section_is_taken_as_it_is() -> None:
    config = TextEmbedderConfig.model_validate(
        {
            "type": "text_embedder",
            "from_pretrained": "./ckpts/google/t5-v1_1-xxl",
            "cache_dir": "cache",
            "max_length": 512,
            "shardformer": True,
        }
    )
    assert (config.kind, config.max_length) == ("auto", 512)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "kind auto needs a folder with weights"),
        ({"kind": "t5"}, "kind t5 needs a folder with weights"),
        ({"kind": "hashed_ngrams"}, "context_in_dim"),
        ({"kind": "hashed_ngrams", "width": 8, "from_pretrained": "x"}, "`x` cannot be used"),
        ({"kind": "clip", "width": 8, "from_pretrained": "x"}, "the width of clip comes with its weights"),
        ({"kind": "hashed_ngrams", "width": 8, "max_length": 1}, "greater than or equal to 2"),
        ({"kind": "bert", "from_pretrained": "x"}, "'t5', 'clip'"),
    ],
)
def test_sections_that_contradict_themselves(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TextEmbedderConfig.model_validate(config)
    with pytest.raises(ConfigError, match=told):
        build_model({"type": "text_embedder", **config})


def test_without_transformers_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SetupError, match="transformers, which is not installed") as caught:
        build_model({"type": "text_embedder", "from_pretrained": "somewhere"})
    assert caught.value.exit_code == 5
    assert caught.value.hint == "python -m pip install 'osora[text]'"
