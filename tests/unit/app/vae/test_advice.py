"""What is said of lengths and sizes before a training."""

from __future__ import annotations

from typing import Any

import pytest

from osora_cli.app.vae.advice import WARNING, advice
from osora_cli.config.load import load_config
from osora_cli.config.overrides import Override
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.data.buckets import BucketTable


def said(bucket_config: dict[str, Any], *, preset: str = "vae/train/video_dc_ae", **changes: Any) -> list[str]:
    overrides = [Override((key,), value, f"--{key}") for key, value in changes.items()]
    config = load_config(preset, TrainVaeConfig, overrides).config
    return advice(config, BucketTable(bucket_config, 32).buckets)


def test_the_shipped_size_needs_no_word() -> None:
    assert said({"256px_ar1:1": {32: (1.0, 1)}}) == []


@pytest.mark.parametrize(
    ("bucket", "without", "with_"),
    [
        ({"256px_ar1:1": {96: (1.0, 1)}}, "101 GiB", "34 GiB"),
        ({"512px_ar1:1": {32: (1.0, 1)}}, "131 GiB", "42 GiB"),
        ({"256px_ar1:1": {32: (1.0, 4)}}, "131 GiB", "42 GiB"),
    ],
)
def test_large_batches_without_recomputation_are_warned_of(bucket: dict[str, Any], without: str, with_: str) -> None:
    (line,) = said(bucket)
    assert line.startswith(WARNING)
    assert without in line
    assert with_ in line
    assert "--grad-checkpoint" in line
    assert said(bucket, grad_checkpoint=True) == []


def test_odd_lengths_get_the_advice() -> None:
    (line,) = said({"256px_ar1:1": {1: (1.0, 1), 32: (1.0, 1), 36: (1.0, 1), 44: (1.0, 1)}})
    assert line.startswith("clips of 36, 44 frames")
    assert "multiples of 32" in line


@pytest.mark.parametrize("name", ["96f", "512px", "128px", "decoder_256px"])
def test_presets_need_no_warning(name: str) -> None:
    preset = f"vae/train/video_dc_ae_{name}"
    config = load_config(preset, TrainVaeConfig).config
    assert advice(config, BucketTable(config.bucket_config, 32).buckets) == []
