"""Hashed n-grams: the same everywhere, order and shared word parts visible, padding like T5's."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from osora_cli.model.build import build_model
from osora_cli.model.text_hashed import HashedNgramEmbedder

TEXTS = ["", "A dog runs.", "Ein Bär läuft über die Straße", "熊が走る", "Медведь бежит", "🐻 " * 40, "a\ud800b", "İi"]
# Of all values, as float32, made once. Another number means that embeddings in caches and checkpoints changed.
DIGEST = "6b89e2b02455e6fe846f3ea9d929a31d542c4f263a12a9db4469ef01930ef0e9"


def embed(texts: list[str], width: int = 64, max_length: int = 12) -> tuple[Tensor, Tensor]:
    embedding = HashedNgramEmbedder(width, max_length).embed(texts)
    assert embedding.pooled is not None
    return embedding.tokens, embedding.pooled


def digest_of_texts() -> str:
    tokens, pooled = embed(TEXTS)
    values = torch.cat([tokens.flatten(), pooled.flatten()]).numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def similarity(one: str, two: str) -> float:
    _, pooled = embed([one, two], width=2048, max_length=64)
    return float(cosine_similarity(pooled[0], pooled[1], dim=0))


def test_the_values_never_change() -> None:
    assert digest_of_texts() == DIGEST


@pytest.mark.parametrize("hash_seed", ["0", "1234"])
def test_every_process_gives_the_same(hash_seed: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_text_hashed as t; "
    out = subprocess.run(
        [sys.executable, "-c", code + "print(t.digest_of_texts())"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == DIGEST


def test_a_text_does_not_depend_on_its_batch() -> None:
    tokens, pooled = embed(TEXTS)
    for index, text in enumerate(TEXTS):
        alone_tokens, alone_pooled = embed([text])
        assert torch.equal(alone_tokens[0], tokens[index])
        assert torch.equal(alone_pooled[0], pooled[index])


def test_texts_differ_and_every_vector_has_the_same_size() -> None:
    tokens, pooled = embed(TEXTS)
    assert len({tuple(row.tolist()) for row in pooled}) == len(TEXTS)
    assert torch.allclose(tokens.square().mean(-1), torch.ones(len(TEXTS), 12), atol=1e-6)
    assert torch.allclose(pooled.square().mean(-1), torch.ones(len(TEXTS)), atol=1e-6)


def test_words_then_the_end_then_padding() -> None:
    (empty, dog, longer), _ = embed(["", "a dog", "a dog " * 20])
    end, pad = empty[0], empty[1]
    assert torch.equal(empty[1:], pad.expand(11, -1))
    assert torch.equal(dog[2], end)
    assert torch.equal(dog[3:], pad.expand(9, -1))
    assert torch.equal(longer[:2], dog[:2])
    assert torch.equal(longer[11], end)  # cut, with the end kept
    assert not torch.equal(longer[10], pad)


def test_padding_for_ranks_goes_on_as_it_began() -> None:
    embedder = HashedNgramEmbedder(64, 12)
    short, longer = embedder.embed(["a dog"]), embedder.embed(["a dog"], length=15)
    assert torch.equal(longer.tokens[:, :12], short.tokens)
    assert torch.equal(longer.tokens[:, 12:], short.tokens[:, -1:].expand(-1, 3, -1))
    assert torch.equal(embedder.embed(["x " * 50], length=15).tokens[:, 12:], longer.tokens[:, 12:])


def test_order_shows() -> None:
    tokens, pooled = embed(["dog chases cat", "cat chases dog"])
    assert not torch.equal(pooled[0], pooled[1])
    assert not torch.equal(tokens[0, 2], tokens[1, 0])  # "cat", after another word


def test_shared_words_and_word_parts_bring_texts_closer() -> None:
    base = "a dog is running on the beach"
    assert similarity(base, "a dog is running on the sand") > similarity(base, "a cat sleeps in the box") + 0.2
    assert similarity("running", "runner") > similarity("running", "zebra") + 0.05
    assert abs(similarity("clouds drift past", "boats anchor here")) < 0.25


def test_case_and_spaces_do_not_matter() -> None:
    tokens, _ = embed(["A  Dog\n", " a dog", "Ä MÉDVED Я", "ä médved я"])
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[2], tokens[3])


@pytest.mark.parametrize("width", [1, 7, 9, 4096])
def test_any_width(width: int) -> None:
    tokens, pooled = embed(["a dog"], width=width)
    assert tokens.shape == (1, 12, width)
    assert pooled.shape == (1, width)
    assert bool(tokens.isfinite().all())
    assert bool(pooled.isfinite().all())


def test_built_by_its_section_in_any_dtype() -> None:
    config = {"type": "text_embedder", "kind": "hashed_ngrams", "width": 64}
    model = build_model(config, dtype=torch.bfloat16)
    assert isinstance(model, HashedNgramEmbedder)
    assert (model.max_length, model.token_width, model.pooled_width) == (77, 64, 64)
    embedding = model.embed(["a dog"])
    assert embedding.pooled is not None
    assert embedding.tokens.dtype == embedding.pooled.dtype == torch.bfloat16
    exact = HashedNgramEmbedder(64, 77).embed(["a dog"])
    assert torch.equal(embedding.tokens, exact.tokens.to(torch.bfloat16))
    assert not model.state_dict()
    assert not list(model.parameters())


def test_meta_builds() -> None:
    config = {"type": "text_embedder", "kind": "hashed_ngrams", "width": 64}
    assert {b.device.type for b in build_model(config, device="meta").buffers()} == {"meta"}
