"""T5 and CLIP against transformers itself, with tiny encoders and tokenizers made here; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osora_cli.errors import CheckpointError, ConfigError, OsoraError, SetupError
from osora_cli.model.build import build_model
from osora_cli.model.text_pretrained import ClipTextEmbedder, T5TextEmbedder

WHY = "the extra `text` is not installed: python -m pip install 'osora[text]'"
transformers = pytest.importorskip("transformers", reason=WHY)
sentencepiece = pytest.importorskip("sentencepiece", reason=WHY)
text_encoders = pytest.importorskip("support.text_encoders")
make_t5, make_clip, clip_text_config = text_encoders.make_t5, text_encoders.make_clip, text_encoders.clip_text_config
START, END, CLIP_LENGTH = text_encoders.START, text_encoders.END, text_encoders.CLIP_LENGTH
pytestmark = [
    # Of sentencepiece's SWIG types, and of transformers before 5 about a default of its tokenizers.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*clean_up_tokenization_spaces.*:FutureWarning"),
]

TEXTS = ["a dog runs over the green hill", "", "The CAT, sleeping", "waves " * 60, "  Ｆｕｌｌ ﬁne  café 熊\n\t"]
T5_LENGTH = 24


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip"))


def build(folder: Path | str, max_length: int | None, **more: Any) -> Any:
    keys = ("device", "dtype")
    config = {"type": "text_embedder", "from_pretrained": str(folder), "max_length": max_length}
    config.update({key: value for key, value in more.items() if key not in keys})
    return build_model(config, **{key: more[key] for key in keys if key in more})


def t5_ids(folder: Path, texts: list[str], length: int, padded: int) -> Tensor:
    """By sentencepiece alone: pieces, the end, padding."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    rows = [[*pieces.encode(text)[: length - 1], 1] for text in texts]
    return torch.tensor([row + [0] * (padded - len(row)) for row in rows])


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


# ---- T5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, T5_LENGTH + 3])
def test_t5_is_the_encoder_over_padded_ids_without_a_mask(t5_folder: Path, length: int | None) -> None:
    embedder = build(t5_folder, T5_LENGTH)
    assert isinstance(embedder, T5TextEmbedder)
    assert (embedder.max_length, embedder.token_width, embedder.pooled_width) == (T5_LENGTH, 32, None)
    embedding = embedder.embed(TEXTS, length=length)
    ids = t5_ids(t5_folder, TEXTS, T5_LENGTH, length or T5_LENGTH)
    encoder = transformers.T5EncoderModel.from_pretrained(t5_folder).eval()
    with torch.no_grad():
        unmasked = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        masked = encoder(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    assert embedding.pooled is None
    torch.testing.assert_close(embedding.tokens, unmasked, rtol=1e-5, atol=1e-6)
    assert float((masked - unmasked)[0].abs().max()) > 1e-3  # so the comparison tells the two apart


def test_t5_null(t5_folder: Path) -> None:
    embedder = build(t5_folder, T5_LENGTH)
    empty = embedder.embed([""]).tokens[0]
    null = embedder.null(2, length=T5_LENGTH + 2)
    assert null.pooled is None
    for row in null.tokens:
        assert torch.equal(row[:T5_LENGTH], empty)
        assert torch.equal(row[T5_LENGTH:], empty[-1:].expand(2, -1))


def test_t5_length_when_none_is_given(t5_folder: Path) -> None:
    embedder = build(t5_folder, None)
    assert embedder.max_length == 512
    assert embedder.embed(["a dog"]).tokens.shape == (1, 512, 32)


def test_t5_in_bf16_is_bf16_throughout(t5_folder: Path) -> None:
    embedder, exact = build(t5_folder, T5_LENGTH, dtype=torch.bfloat16), build(t5_folder, T5_LENGTH)
    assert {parameter.dtype for parameter in embedder.parameters()} == {torch.bfloat16}
    for (name, half), full in zip(embedder.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(half, full.to(torch.bfloat16)), name
    tokens, expected = embedder.embed(TEXTS).tokens, exact.embed(TEXTS).tokens
    assert tokens.dtype == torch.bfloat16
    assert float((tokens.float() - expected).norm() / expected.norm()) < 2e-2


def test_dropout_stays_off_and_nothing_is_trained(t5_folder: Path) -> None:
    embedder = build(t5_folder, T5_LENGTH)
    before = embedder.embed(TEXTS).tokens
    outer = nn.ModuleList([embedder]).train()
    assert outer.training
    assert not any(module.training for module in embedder.modules())
    after = embedder.embed(TEXTS).tokens
    assert torch.equal(before, after)
    assert not any(parameter.requires_grad for parameter in embedder.parameters())
    assert not after.requires_grad
    layer = nn.Linear(32, 1)
    layer(after).sum().backward()  # what is given can be an input of a network in training
    assert layer.weight.grad is not None


def test_a_callers_autocast_changes_nothing(t5_folder: Path) -> None:
    embedder = build(t5_folder, T5_LENGTH)
    expected = embedder.embed(TEXTS).tokens
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embedder.embed(TEXTS).tokens, expected)


def test_meta_has_shapes_and_no_weights(t5_folder: Path) -> None:
    shapes = {name: p.shape for name, p in build(t5_folder, T5_LENGTH).named_parameters()}
    meta = build(t5_folder, T5_LENGTH, device="meta", dtype=torch.bfloat16)
    assert {name: p.shape for name, p in meta.named_parameters()} == shapes
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}


# ---- CLIP -------------------------------------------------------------------------------------------------------


def test_clip_pools_at_the_first_end_token(clip_folder: Path) -> None:
    embedder = build(clip_folder, CLIP_LENGTH)
    assert isinstance(embedder, ClipTextEmbedder)
    assert (embedder.max_length, embedder.token_width, embedder.pooled_width) == (CLIP_LENGTH, 32, 32)
    vocabulary = json.loads((clip_folder / "vocab.json").read_text())
    units = [["the</w>", "dog</w>"], [], ["ru", "n", "s</w>"], ["w", "a", "v", "e</w>"] * 9]
    rows = [[START, *text[: CLIP_LENGTH - 2], END] for text in units]
    ids = torch.tensor([[vocabulary[unit] for unit in [*row, *[END] * (CLIP_LENGTH - len(row))]] for row in rows])
    embedding = embedder.embed(["The dog", "", "runs", "wave " * 9])
    encoder = transformers.CLIPTextModel.from_pretrained(clip_folder).eval()
    with torch.no_grad():
        output = encoder(input_ids=ids)
    torch.testing.assert_close(embedding.tokens, output.last_hidden_state, rtol=1e-5, atol=1e-6)
    for row, pooled in enumerate(embedding.pooled):
        torch.testing.assert_close(pooled, embedding.tokens[row, len(rows[row]) - 1])
        assert torch.equal(pooled, embedding.tokens[row, len(rows[row]) - 1])


def test_clip_padding_does_not_reach_the_pooled_vector(clip_folder: Path) -> None:
    long, short = build(clip_folder, CLIP_LENGTH), build(clip_folder, 5)
    torch.testing.assert_close(long.embed(["the dog"]).pooled, short.embed(["the dog"]).pooled, rtol=1e-5, atol=1e-6)


def test_clip_null_and_lengths(clip_folder: Path) -> None:
    embedder = build(clip_folder, CLIP_LENGTH)
    null = embedder.null(3)
    assert torch.equal(null.pooled, embedder.embed([""]).pooled.expand(3, -1))
    assert null.tokens.shape == (3, CLIP_LENGTH, 32)
    with pytest.raises(ValueError, match=f"`{CLIP_LENGTH + 1}` tokens: it must be {CLIP_LENGTH}"):
        embedder.embed([""], length=CLIP_LENGTH + 1)


def test_clip_with_fewer_positions_than_tokens_is_refused(clip_folder: Path) -> None:
    for length, said in ((17, 17), (None, 77)):
        with pytest.raises(ConfigError, match=f"max_length `{said}` is more than the 16 positions"):
            build(clip_folder, length)


def test_the_text_half_of_a_whole_clip(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    (folder / "model.safetensors").unlink()
    text = transformers.CLIPTextModel.from_pretrained(clip_folder)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=text.config.to_dict(),
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    whole = transformers.CLIPModel(config)
    prefixed = {
        key if key.startswith("text_model.") else f"text_model.{key}": v for key, v in text.state_dict().items()
    }
    assert set(prefixed) <= set(whole.state_dict())
    whole.load_state_dict(prefixed, strict=False)
    whole.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "clip"
    expected, got = build(clip_folder, CLIP_LENGTH).embed(TEXTS), build(folder, CLIP_LENGTH).embed(TEXTS)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.pooled, expected.pooled)


# ---- what is refused --------------------------------------------------------------------------------------------


def test_a_kind_that_the_weights_are_not(t5_folder: Path, tmp_path: Path) -> None:
    assert isinstance(build(t5_folder, T5_LENGTH, kind="t5"), T5TextEmbedder)
    with pytest.raises(ConfigError, match="is a model of type `t5`, not `clip`") as caught:
        build(t5_folder, T5_LENGTH, kind="clip")
    assert caught.value.hint == "kind: t5"
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="is a model of type `bert`") as caught:
        build(tmp_path, T5_LENGTH)
    assert caught.value.allowed == "t5, clip, clip_text_model"


def test_a_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="`google/t5-v1_1-xxl` is no folder") as caught:
        build("google/t5-v1_1-xxl", None)
    assert caught.value.hint == "hf://google/t5-v1_1-xxl takes it from the hub"
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        build(tmp_path, None)
    assert caught.value.hint is None


def test_a_tokenizer_that_is_missing_is_not_made_up(t5_folder: Path, clip_folder: Path, tmp_path: Path) -> None:
    for folder, files in ((t5_folder, ["spiece.model"]), (clip_folder, ["vocab.json", "merges.txt"])):
        bare = copied(folder, tmp_path / folder.name)
        for file in files:
            (bare / file).unlink()
        with pytest.raises(CheckpointError, match=r"tokenizer|cannot be loaded"):
            build(bare, CLIP_LENGTH)


def test_weights_that_lack_tensors_are_not_made_up(t5_folder: Path, tmp_path: Path) -> None:
    folder = copied(t5_folder, tmp_path)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    key = "encoder.block.1.layer.0.SelfAttention.k.weight"
    del weights[key]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"lack 1 tensors of the encoder:\n  {key}"):
        build(folder, T5_LENGTH)


@pytest.mark.parametrize("damage", ["gone", "torn", "shape"])
def test_weights_that_cannot_be_read(clip_folder: Path, tmp_path: Path, damage: str) -> None:
    folder = copied(clip_folder, tmp_path)
    file = folder / "model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="cannot be loaded as a text encoder: ") as caught:
        build(folder, CLIP_LENGTH)
    assert caught.value.exit_code == 4


def test_loading_is_quiet_and_leaves_transformers_as_it_was(t5_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    build(t5_folder, T5_LENGTH).embed(TEXTS)
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")


# ---- the hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client's cache with one repository in it, and no network."""
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--acme--tiny-clip"
    shutil.copytree(clip_folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    hub_constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_from_the_hub(hub: Path, clip_folder: Path) -> None:
    got = build("hf://acme/tiny-clip", CLIP_LENGTH, cache_dir=str(hub)).embed(TEXTS)
    assert torch.equal(got.tokens, build(clip_folder, CLIP_LENGTH).embed(TEXTS).tokens)


@pytest.mark.parametrize(
    ("path", "error", "told"),
    [
        ("hf://acme/other", SetupError, "the hub did not give `hf://acme/other`"),
        ("hf://acme", CheckpointError, "names no repository"),
        ("hf://acme/tiny-clip/model.safetensors", CheckpointError, "names no repository"),
        ("acme/tiny-clip", CheckpointError, "is no folder"),
    ],
)
def test_what_the_hub_does_not_have(hub: Path, path: str, error: type[OsoraError], told: str) -> None:
    with pytest.raises(error, match=told):
        build(path, CLIP_LENGTH, cache_dir=str(hub))
