from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from support.clips import make_clip
from support.tables import clip_row, raw_row, write_table

from osora_cli.app.data.check import check_table, load_training_config
from osora_cli.app.data.input import check_buckets, load_table, make_sampler, spatial_step
from osora_cli.app.feed import TableFeed
from osora_cli.app.recipes import check_training
from osora_cli.app.vae.input import check_vae_input
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.config.schema import TrainConfig, TrainVaeConfig
from osora_cli.config.sections import DatasetConfig
from osora_cli.data.sampler import Position
from osora_cli.data.stored_text import StoredColumn
from osora_cli.errors import ConfigError, DataError

DC_AE = DcAeConfig(model_name="dc-ae-f32t4c128")


def _vae(**values: Any) -> TrainVaeConfig:
    return TrainVaeConfig.model_validate({"model": {"model_name": "dc-ae-f32t4c128"}, **values})


class _Diffusion(TrainConfig):
    """What the configs of diffusion trainings have in common, for the rule that reads it."""

    model: Any = None
    ae: Any = None
    ae_spatial_compression: int | None = None


class _Patches:
    def __init__(self, patch_size: int) -> None:
        self.patch_size = patch_size


def test_what_sides_of_buckets_are_multiples_of() -> None:
    assert spatial_step(_vae()) == 32
    assert spatial_step(_Diffusion(ae=HunyuanVaeConfig(), model=_Patches(2))) == 16
    assert spatial_step(_Diffusion(ae=DC_AE, model=_Patches(1))) == 32
    assert spatial_step(_Diffusion(ae=DC_AE, model=_Patches(1), ae_spatial_compression=64)) == 64
    assert spatial_step(TrainConfig()) == 16


def test_lengths_that_the_autoencoder_does_not_take_are_refused() -> None:
    check_buckets(_vae(bucket_config={"256px": {1: (1.0, 1), 32: (1.0, 1)}}))
    with pytest.raises(ConfigError, match="`33` frames") as caught:
        check_buckets(_vae(bucket_config={"256px": {33: (1.0, 1)}}))
    assert "frames 32 or 36" in str(caught.value)
    with pytest.raises(ConfigError, match="32"):
        check_buckets(_Diffusion(ae=HunyuanVaeConfig(), bucket_config={"256px": {32: (1.0, 1)}}))
    check_buckets(_Diffusion(ae=HunyuanVaeConfig(), bucket_config={"256px": {33: (1.0, 1)}}))


def test_keys_of_the_dataset_reach_table_and_sampler(tmp_path: Path) -> None:
    rows = [raw_row(f"{i}.mp4", "x", 40, 256, 256, 24.0) for i in range(6)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), path)
    dataset = DatasetConfig(data_path=str(path), memory_efficient=True, fps_max=24, balance_window=8)
    table = load_table(dataset)
    assert isinstance(table.path, StoredColumn)
    config = _vae(dataset=dataset, bucket_config={"256px": {32: (1.0, 1)}}, seed=3)
    sampler = make_sampler(table, config, num_replicas=2, rank=1)
    assert (sampler.seed, sampler.rank, sampler.num_replicas, sampler._balance_window) == (3, 1, 2, 8)
    assert len(sampler.epoch_batches(0)) == 3
    with pytest.raises(ConfigError, match="no table of clips is given"):
        load_table(DatasetConfig())
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        _vae(bucket_config={"256px": {32: (8, 1)}})


def test_scores_that_are_asked_for_and_not_there_are_said(tmp_path: Path) -> None:
    rows = [raw_row(f"{i}.mp4", "x", 40, 256, 256, 24.0) for i in range(3)]
    path = write_table(tmp_path / "t.csv", rows)
    (note,) = load_table(DatasetConfig(data_path=str(path), vmaf=True)).notes
    assert note.startswith("`dataset.vmaf` is on and the table has no column `score_vmafmotion`")
    assert load_table(DatasetConfig(data_path=str(path))).notes == ()
    for row, score in zip(rows, ("1.5", "", "2"), strict=True):
        row["score_vmafmotion"] = score
    write_table(path, rows)
    (note,) = load_table(DatasetConfig(data_path=str(path), vmaf=True)).notes
    assert "1 of 3 rows have nothing in column" in note


def test_a_config_is_taken_for_the_training_whose_schema_it_fulfils(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {model_name: dc-ae-f32t4c128}\nmixed_strategy: mixed_video_image\n")
    command, loaded = load_training_config(str(path))
    assert (command.name, type(loaded.config)) == ("train vae", TrainVaeConfig)
    path.write_text("model: {model_name: dc-ae-f32t4c128}\nmixed_stratgy: x\n")
    with pytest.raises(ConfigError, match="mixed_stratgy"):
        load_training_config(str(path))
    table = write_table(tmp_path / "t.csv", [raw_row("a.mp4", "x", 40, 256, 256, 24.0)])
    result = check_table(table, _vae(bucket_config={"256px": {32: (1.0, 1)}}), "train vae", ranks=2)
    assert result.missing == [0]
    assert result.error is not None


def test_the_same_table_opens_a_training_and_no_batch_ends_it_before_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = [make_clip(tmp_path / f"{i}.mp4", 20, (96, 64)) for i in range(3)]
    path = write_table(tmp_path / "t.csv", [{**clip_row(clip), "score_vmafmotion": 2.0} for clip in clips])
    config = _vae(
        dataset={"data_path": str(path), "vmaf": True, "fps_max": 30},
        bucket_config={"64px": {8: (1.0, 1)}},
        vae_loss_config={"perceptual_loss_weight": 0},
        num_workers=0,
    )
    checked = check_vae_input(config)
    table = check_table(path, config, "train vae").report.lines()
    assert table[0].startswith("bucket ")
    assert "\n".join(table) in "\n".join(checked.notes)
    feed = TableFeed(checked.table, checked.sampler, config, Position(0, 0), pin_memory=False)
    batch = next(feed.batches(0, 0))
    assert batch.texts[0].endswith(" 24.0 FPS, 2 motion score.")
    feed.close()
    monkeypatch.setattr("osora_cli.model.build.build_model", None)
    none = config.model_copy(update={"bucket_config": {"512px": {8: (1.0, 1)}}})
    training = check_training("train vae", none)
    with pytest.raises(DataError, match="no bucket gives a batch"):
        training.report.require_batches()
