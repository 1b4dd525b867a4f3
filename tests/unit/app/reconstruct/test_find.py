"""Which weights, architecture and tiles a reconstruction takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support.recon import TRAINING, config, make_run, weights
from support.tiny import CONFIG

from osora_cli.app.reconstruct.find import find_autoencoder, trained_size
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.config.freeze import write_config
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig
from osora_cli.errors import CheckpointError, ConfigError


def test_averaged_weights_are_taken_where_there_are_any(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    plain = make_run(tmp_path / "plain", ema=False)
    got = {}
    for name, source, use in (("ema", run, True), ("own", run, False), ("none", plain, True)):
        result = reconstruct(config(clips[0], source, tmp_path / name, use_ema=use))
        got[name] = result.clips[0].psnr
        assert result.protocol["weights"]["ema"] == (name == "ema")
    assert got["own"] == got["none"] != got["ema"]


def test_weights_of_a_file_are_the_same_weights(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(weights(105), file)
    architecture = TRAINING.model.model_dump(include={"encoder", "decoder", "latent_channels"})
    # Nothing says what length a bare file was trained on: the tile's is taken.
    architecture["temporal_tile_size"] = 8
    from_file = reconstruct(config(clips[1], file, tmp_path / "file", model=architecture))
    from_run = reconstruct(config(clips[1], run, tmp_path / "run"))
    assert from_file.clips[0].psnr == from_run.clips[0].psnr
    assert from_file.protocol["weights"] == {"path": str(file), "step": None, "ema": False}
    inside = next((run / "epoch0-global_step5").glob("ema.safetensors"), None)
    if inside is not None:
        assert reconstruct(config(clips[1], inside, tmp_path / "inside")).clips[0].psnr == from_run.clips[0].psnr
    with pytest.raises(ConfigError, match="no architecture"):
        reconstruct(config(clips[1], file, tmp_path / "nothing"))
    (tmp_path / "hub").mkdir()
    shutil.copy(file, tmp_path / "hub" / "model.safetensors")
    from_folder = reconstruct(config(clips[1], tmp_path / "hub", tmp_path / "folder", model=architecture))
    assert from_folder.clips[0].psnr == from_run.clips[0].psnr


def test_a_checkpoint_that_lacks_a_part_is_no_folder_of_weights(tmp_path: Path, clips: list[Path]) -> None:
    checkpoint = make_run(tmp_path / "run") / "epoch0-global_step5"
    (checkpoint / "running_states.json").unlink()
    assert list(checkpoint.rglob("*.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        reconstruct(config(clips[1], checkpoint, tmp_path / "out"))
    assert caught.value.exit_code == 4


def test_the_newest_checkpoint_that_verifies_is_taken_and_others_are_named(tmp_path: Path, clips: list[Path]) -> None:
    run = make_run(tmp_path / "run", steps=(3, 6))
    result = reconstruct(config(clips[2], run, tmp_path / "new"))
    assert result.protocol["weights"]["step"] == 6
    shard = next((run / "epoch0-global_step6" / "model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = reconstruct(config(clips[2], run, tmp_path / "old"))
    assert result.protocol["weights"]["step"] == 3
    assert any("epoch0-global_step6" in note for note in result.notes)
    with pytest.raises(CheckpointError):
        reconstruct(config(clips[2], run / "epoch0-global_step6", tmp_path / "bad"))
    assert not (tmp_path / "bad").exists()


def test_an_architecture_that_contradicts_the_run_is_refused(run: Path) -> None:
    own = TRAINING.model.model_dump(include={"encoder", "decoder", "latent_channels"})

    def found(**model: Any) -> DcAeConfig:
        return find_autoencoder(DcAeConfig.model_validate({"from_pretrained": str(run), **model})).config

    assert found().encoder == found(**own).encoder == found(latent_channels=4).encoder == TRAINING.model.encoder
    with pytest.raises(ConfigError, match="latent_channels` is `8` here and `4` there") as caught:
        found(latent_channels=8)
    assert "leave `model.latent_channels` out" in str(caught.value)
    with pytest.raises(ConfigError, match="architecture is not that of the run"):
        found(model_name="dc-ae-f32t4c128")
    assert found(temporal_tile_size=16).temporal_tile_size == 16


def test_tiles_are_of_the_trained_size_unless_given(run: Path) -> None:
    def found(**model: Any) -> Any:
        return find_autoencoder(DcAeConfig.model_validate({"from_pretrained": str(run), **model}))

    tiled = found(use_spatial_tiling=True, use_temporal_tiling=True)
    assert (tiled.config.spatial_tile_size, tiled.config.temporal_tile_size, tiled.notes) == (32, 8, [])
    given = found(use_spatial_tiling=True, spatial_tile_size=64)
    assert given.config.spatial_tile_size == 64
    assert len(given.notes) == 1
    assert "trained on 32 px: expect artefacts; `--model.spatial-tile-size 32` takes" in given.notes[0]
    assert found().chunk == 8


def test_a_run_on_stills_names_no_tile(tmp_path: Path) -> None:
    run = tmp_path / "stills"
    run.mkdir()
    write_config(TrainVaeConfig.model_validate({**CONFIG, "bucket_config": {"32px_ar1:1": {1: [1.0, 2]}}}), run)
    trained = run / "model.safetensors"
    save_file(weights(1), trained)
    model = {"from_pretrained": str(trained), "use_temporal_tiling": True, "temporal_tile_size": 16}
    found = find_autoencoder(DcAeConfig.model_validate(model))
    assert (found.config.temporal_tile_size, found.chunk) == (16, 1)
    assert found.notes == ["model.temporal_tile_size is 16 frames, the model was trained on 1 frames: expect artefacts"]


def test_trained_size_is_the_longest_and_largest_of_the_buckets() -> None:
    size = trained_size({"256px": {1: [0.5, 1], 33: [1.0, 1]}, "512px_ar16:9": {17: [1.0, 1]}}, 32)
    assert size is not None
    assert (size.frames, size.edge) == (33, 512)
    assert trained_size({}, 32) is None


def test_missing_weights(tmp_path: Path, clips: list[Path]) -> None:
    with pytest.raises(ConfigError, match="no weights are given"):
        reconstruct(config(clips[0], None, tmp_path / "out"))
    for name in ("absent", "absent.safetensors", "epoch*-global_step*"):
        with pytest.raises(CheckpointError):
            reconstruct(config(clips[0], tmp_path / name, tmp_path / "out"))
    with pytest.raises(ConfigError, match="no clips are given"):
        reconstruct(ReconstructConfig.model_validate({"model": {"from_pretrained": str(make_run(tmp_path / "r"))}}))


def test_an_export_beside_its_checkpoints_does_not_hide_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    save_file(weights(7), run / "exported.safetensors")
    found = find_autoencoder(DcAeConfig(from_pretrained=str(run)))
    assert Path(found.weights).name == "epoch0-global_step5"
