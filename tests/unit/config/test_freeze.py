"""A run's config: written so that nobody sees half of it, read back equal, compared for a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osora_cli.config.freeze import (
    Change,
    check_resume,
    diff_configs,
    plain_text,
    thaw,
    to_plain,
    to_yaml,
    write_config,
)
from osora_cli.config.load import load_config
from osora_cli.config.overrides import Override
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.values import effective_lr, effective_warmup_steps
from osora_cli.errors import ConfigError


def preset(*overrides: Override) -> TrainVaeConfig:
    return load_config("vae/train/video_dc_ae", TrainVaeConfig, overrides).config


def test_what_is_written_is_a_valid_config_and_equal(tmp_path: Path) -> None:
    config = preset(
        Override(("exp_name",), "007: # é\n", "--exp-name"),
        Override(("load",), ["a", "b"], "--load"),
        Override(("bucket_config", "512px", 8), [[0.5, 0.25], 3], "--bucket-config.512px.8"),
    )
    write_config(config, tmp_path, "osora train vae")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.txt", "config.yaml"], "nothing is left beside them"
    assert load_config(tmp_path / "config.yaml", TrainVaeConfig).config == config
    assert load_config(tmp_path / "config.txt", TrainVaeConfig).config == config
    assert (tmp_path / "config.yaml").read_text().startswith("# osora train vae\n")
    assert json.loads((tmp_path / "config.txt").read_text())["exp_name"] == "007: # é\n"
    frozen = thaw(tmp_path)
    assert (frozen.config, frozen.command.name, frozen.path) == (config, "train vae", tmp_path / "config.yaml")


def test_every_field_is_there() -> None:
    assert set(to_plain(preset())) == set(TrainVaeConfig.model_fields)
    assert "pin_memory_cache_pre_alloc_numels: [52428800," in to_yaml(preset())


def test_writing_over_and_failing_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(preset(), tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_config(preset(Override(("epochs",), 3, "--epochs")), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.txt", "config.yaml"]


def test_thaw_reads_either_file_and_says_when_there_is_none(tmp_path: Path) -> None:
    write_config(preset(), tmp_path)
    (tmp_path / "config.yaml").unlink()
    assert thaw(tmp_path, [Override(("epochs",), 3, "--epochs")]).config.model_dump()["epochs"] == 3
    (tmp_path / "config.txt").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        thaw(tmp_path)


def test_the_differences_of_two_configs() -> None:
    old = preset()
    new = preset(
        Override(("lr",), 1e-5, "--lr"),
        Override(("optim", "betas"), [0.5, 0.6], "--optim.betas"),
        Override(("bucket_config",), {"512px": {8: [1.0, 1]}}, "--bucket-config"),
    )
    assert diff_configs(old, old) == []
    assert diff_configs(old, new) == [
        Change("bucket_config.256px_ar1:1", {32: [1.0, 1]}, None),
        Change("bucket_config.512px", None, {8: [1.0, 1]}),
        Change("optim.betas", [0.9, 0.98], [0.5, 0.6]),
        Change("lr", None, 1e-5),
    ]


@pytest.mark.parametrize(
    "override",
    [
        Override(("lr",), 1e-5, "--lr"),
        Override(("optim", "betas"), [0.5, 0.6], "--optim.betas"),
        Override(("model", "from_pretrained"), "x", "--model.from-pretrained"),
        Override(("model", "use_spatial_tiling"), True, "--model.use-spatial-tiling"),
        Override(("model", "spatial_tile_size"), 128, "--model.spatial-tile-size"),
        Override(("ema_decay",), None, "--ema-decay"),
        Override(("dtype",), "fp32", "--dtype"),
        Override(("plugin",), "none", "--plugin"),
        Override(("max_steps",), 5, "--max-steps"),
    ],
    ids=lambda o: o.flag,
)
def test_what_a_resume_may_change(override: Override) -> None:
    assert [change.key for change in check_resume(preset(), preset(override))] == [override.key]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (Override(("model", "latent_channels"), 16, "--x"), "its checkpoints hold another model"),
        (Override(("model", "model_name"), "other", "--x"), "its checkpoints hold another model"),
        (Override(("exp_name",), "b", "--x"), "a resumed run stays in its folder"),
        (Override(("outputs",), "b", "--x"), "a resumed run stays in its folder"),
    ],
)
def test_what_a_resume_cannot_change(override: Override, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_resume(preset(), preset(override, Override(("lr",), 1.0, "--lr")))
    assert f"`{override.key}` is" in caught.value.message


def test_all_that_a_resume_cannot_change_is_named_at_once() -> None:
    new = preset(Override(("model", "latent_channels"), 16, "--x"), Override(("exp_name",), "b", "--y"))
    with pytest.raises(ConfigError, match="2 things are wrong in what this resume changes"):
        check_resume(preset(), new)


def test_top_level_settings_win() -> None:
    config = preset()
    assert (effective_lr(config), effective_warmup_steps(config)) == (5e-5, 0)
    config = preset(
        Override(("lr",), 0.0, "--lr"),
        Override(("warmup_steps",), 7, "--warmup-steps"),
        Override(("lr_scheduler", "warmup_steps"), 9, "--lr-scheduler.warmup-steps"),
    )
    assert (effective_lr(config), effective_warmup_steps(config)) == (0.0, 7)
    config = preset(Override(("lr_scheduler", "warmup_steps"), None, "--lr-scheduler.warmup-steps"))
    assert effective_warmup_steps(config) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), ("a: b", "'a: b'"), ((0.9, 1), "[0.9, 1]"), ({}, "{}")]
)
def test_one_value_in_one_line(value: object, text: str) -> None:
    assert plain_text(value) == text
