"""The frozen networks of a config: text encoders through transformers, and an autoencoder's random start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_diffusion import CONFIG, HUNYUAN, MODEL

from osora_cli.app.frozen_parts import build_frozen_parts
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.errors import CheckpointError, ConfigError
from osora_cli.model.latents import embed_texts, null_text

WHY = "the extra `text` is not installed: python -m pip install 'osora[text]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("sentencepiece", reason=WHY)
pytestmark = [
    # Of sentencepiece's SWIG types, and of transformers before 5 about a default of its tokenizers.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*clean_up_tokenization_spaces.*:FutureWarning"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from support.text_encoders import make_clip, make_t5

    return make_t5(tmp_path_factory.mktemp("t5")), make_clip(tmp_path_factory.mktemp("clip"))


def config_with(t5: Path, clip: Path, **changes: Any) -> TrainDiffusionConfig:
    model = {**MODEL, "context_in_dim": 32, "vec_in_dim": 32, **changes.pop("model", {})}
    texts = {
        "t5": {"type": "text_embedder", "from_pretrained": str(t5), "max_length": 24},
        "clip": {"type": "text_embedder", "from_pretrained": str(clip), "max_length": 16},
    }
    return TrainDiffusionConfig.model_validate({**CONFIG, **texts, "model": model, **changes})


def test_t5_gives_the_tokens_and_clip_the_pooled_vector(encoders: tuple[Path, Path]) -> None:
    parts = build_frozen_parts(config_with(*encoders), CPU, torch.float32, ae=False)
    assert parts.ae is None
    text = embed_texts(parts, ["the dog", "a hill"], length=27)
    assert (text.t5.shape, text.clip.shape) == ((2, 27, 32), (2, 32))
    null = null_text(parts).extended(27)
    assert torch.equal(null.t5[:, 24:], null.t5[:, 23:24].expand(-1, 3, -1)), "its last position is repeated"
    assert not text.t5.requires_grad


def test_widths_that_come_with_weights_are_compared_with_the_models(encoders: tuple[Path, Path]) -> None:
    t5, clip = encoders
    with pytest.raises(ConfigError, match=r"gives `32` channels, and `model\.vec_in_dim` is `12`"):
        build_frozen_parts(config_with(t5, clip, model={"vec_in_dim": 12}), CPU, torch.float32, ae=False)
    with pytest.raises(ConfigError, match="the embedder gives no pooled vector"):
        build_frozen_parts(config_with(t5, t5), CPU, torch.float32, ae=False)


def test_a_random_autoencoder_is_pointed_out(encoders: tuple[Path, Path]) -> None:
    notes: list[str] = []
    parts = build_frozen_parts(config_with(*encoders, ae=HUNYUAN), CPU, torch.bfloat16, text=False, notes=notes)
    assert (parts.t5, parts.clip) == (None, None)
    assert parts.ae is not None
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in parts.ae.parameters())
    assert notes == ["the autoencoder hunyuan_vae has no weights but random ones: `ae.from_pretrained` is not set"]


def test_missing_weights_name_the_configs_key(encoders: tuple[Path, Path]) -> None:
    config = config_with(*encoders, ae={**HUNYUAN, "from_pretrained": "nowhere.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        build_frozen_parts(config, CPU, torch.float32, text=False)
    assert caught.value.where == "ae.from_pretrained"
    assert "--ae.from-pretrained" in str(caught.value.hint)
