"""Configs of diffusion training: the presets are the reference's, and parts that do not fit are told, all at once."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
from support.golden import load_json
from support.tiny_diffusion import CAUSAL, CONFIG, MODEL

from osora_cli.config.diffusion import TrainDiffusionConfig, check_parts
from osora_cli.config.freeze import check_resume, to_plain
from osora_cli.config.load import load_config
from osora_cli.config.models.autoencoder import compression, is_causal, latent_channels
from osora_cli.config.presets import preset_root
from osora_cli.config.values import effective_lr
from osora_cli.errors import ConfigError

STAGES = ("image", "stage1", "stage2", "stage1_i2v", "stage2_i2v", "high_compression", "demo")
DEFAULT = "diffusion/train/image"


def plain(value: Any) -> Any:
    """Tuples as lists, as a config has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def covered(mine: Any, golden: Any) -> Any:
    """`mine` cut down to the keys that the golden one has; free mappings (buckets, conditions) stay whole."""
    if isinstance(mine, dict) and isinstance(golden, dict) and set(golden) <= set(mine):
        whole = not all(isinstance(key, str) and key.isidentifier() for key in golden)
        return {key: covered(value, golden.get(key)) for key, value in mine.items() if whole or key in golden}
    return mine


@pytest.mark.parametrize("stage", STAGES)
def test_a_preset_is_the_references_config(stage: str) -> None:
    text = load_json("config_resolved")["configs"][f"configs/diffusion/train/{stage}.py"]["repr"]
    golden = plain(ast.literal_eval(text))
    config = load_config(stage, TrainDiffusionConfig, default=DEFAULT).config
    # Folders of the reference's machines, and names that it fetches by itself.
    golden = copy.deepcopy(golden)
    for name, folder in (("t5", "google/t5-v1_1-xxl"), ("clip", "openai/clip-vit-large-patch14")):
        assert golden[name].pop("cache_dir").startswith("/")
        assert golden[name]["from_pretrained"] == folder
        golden[name]["from_pretrained"] = f"./ckpts/{folder}"
    assert covered(to_plain(config), golden) == golden
    assert config.condition_config == golden.get("condition_config")
    if config.condition_config is not None:
        assert list(config.condition_config) == list(golden["condition_config"]), "draws hang on the order"
    check_parts(config)


@pytest.mark.parametrize("stage", STAGES)
def test_a_preset_opens_with_command_hardware_time_and_number(stage: str) -> None:
    root = preset_root()
    assert root is not None
    head = (root / f"diffusion/train/{stage}.yaml").read_text(encoding="utf-8").split("\n\n")[0]
    for word in ("command:", "hardware:", "time:", "expected:", f"{stage}.yaml"):
        assert word in head


def test_the_first_preset_and_what_the_articles_say_of_it() -> None:
    image = load_config(None, TrainDiffusionConfig, default=DEFAULT)
    assert image.name == "diffusion_train_image"
    root = preset_root()
    assert root is not None
    assert "\nasync_io: false\n" in (root / "diffusion/train/image.yaml").read_text()
    for stage, every in (("stage1", 2000), ("stage2", 200)):
        path = root / f"diffusion/train/{stage}.yaml"
        assert "async_io" not in path.read_text(), "it is inherited"
        config = load_config(path, TrainDiffusionConfig).config
        assert (config.ckpt_every, config.keep_n_latest, config.async_io) == (every, 20, False)
        assert effective_lr(config) == 5e-5


def test_what_follows_from_an_autoencoder() -> None:
    hunyuan = load_config("stage1", TrainDiffusionConfig, default=DEFAULT).config.ae
    dc_ae = load_config("high_compression", TrainDiffusionConfig, default=DEFAULT).config.ae
    assert (compression(hunyuan), latent_channels(hunyuan), is_causal(hunyuan)) == ((4, 8), 16, True)
    assert (compression(dc_ae), latent_channels(dc_ae), is_causal(dc_ae)) == ((4, 32), 128, False)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    wrong = {
        **CONFIG,
        "model": {**MODEL, "in_channels": 32, "cond_embed": True},
        "patch_size": 1,
        "is_causal_vae": True,
        "ae_spatial_compression": 6,
        "no_i2v_ref_loss": True,
    }
    with pytest.raises(ConfigError) as caught:
        check_parts(TrainDiffusionConfig.model_validate(wrong))
    for words in (
        "`model.in_channels` is `32`", "`patch_size` is `1`", "`is_causal_vae` is `true`",
        "a patch of the model is 4 px",
        "`model.cond_embed` is true and no `condition_config`", "`no_i2v_ref_loss`",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_small_configs_of_both_kinds_fit(tmp_path: Path) -> None:
    for changes in ({}, CAUSAL):
        check_parts(TrainDiffusionConfig.model_validate({**CONFIG, **changes}))


def test_the_autoencoders_kind_decides_its_keys() -> None:
    with pytest.raises(ValueError, match="block_out_channels"):
        TrainDiffusionConfig.model_validate({**CONFIG, "ae": {**CONFIG["ae"], "block_out_channels": [8]}})
    with pytest.raises(ValueError, match="does not match any of the expected tags"):
        TrainDiffusionConfig.model_validate({**CONFIG, "ae": {"type": "other"}})


@pytest.mark.parametrize("stage", STAGES)
def test_the_references_own_config_is_taken_as_it_stands(stage: str) -> None:
    golden = ast.literal_eval(load_json("config_resolved")["configs"][f"configs/diffusion/train/{stage}.py"]["repr"])
    theirs = to_plain(TrainDiffusionConfig.model_validate(golden))
    mine = to_plain(load_config(stage, TrainDiffusionConfig, default=DEFAULT).config)
    for name in ("t5", "clip"):
        mine[name] = theirs[name]
    assert mine == theirs


def test_a_resume_stays_in_its_latent_space() -> None:
    old = TrainDiffusionConfig.model_validate(CONFIG)
    for key, value in (("scaling_factor", 0.5), ("latent_channels", 8)):
        new = TrainDiffusionConfig.model_validate({**CONFIG, "ae": {**CONFIG["ae"], key: value}})
        with pytest.raises(ConfigError, match=f"`ae.{key}` .*: the run is trained on other latents"):
            check_resume(old, new)
    moved = {"from_pretrained": "moved.safetensors", "use_spatial_tiling": True}
    changes = check_resume(old, TrainDiffusionConfig.model_validate({**CONFIG, "ae": {**CONFIG["ae"], **moved}}))
    assert [change.key for change in changes] == ["ae.from_pretrained", "ae.use_spatial_tiling"]
