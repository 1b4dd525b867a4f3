"""`osora train vae-disc` on real clips: what it starts from, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.disc import write_disc_config
from support.process import Finished, osora
from support.tiny import make_table, records, write_config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and a first stage in bf16 with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("disc")
    make_table(folder)
    config = write_config(folder, max_steps=4, ckpt_every=2, dtype="bf16", ema_decay=0.5)
    finished = osora("train", "vae", config, "--exp-name", "stage1", "--outputs", folder, "--async-io", cwd=folder)
    assert finished.code == 0, finished.stderr
    return folder


def train(home: Path, folder: Path, *argv: str | Path, name: str = "run", **changes: Any) -> Finished:
    config = write_disc_config(folder, **{"max_steps": 1, **changes})
    return osora("train", "vae-disc", config, "--exp-name", name, "--outputs", folder, "--async-io", *argv, cwd=home)


def newest(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def test_starts_from_the_newest_of_a_run_that_verifies(home: Path, tmp_path: Path) -> None:
    source = shutil.copytree(home / "stage1", tmp_path / "stage1")
    shard = next((newest(source) / "model").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    finished = train(home, tmp_path, "--from-pretrained", source)
    assert finished.code == 0, finished.stderr
    assert "passed over" in finished.stderr
    assert "(update 2, in fp32)" in finished.stderr
    assert "the discriminator is fresh" in finished.stderr
    assert [r["step"] for r in records(tmp_path / "run")] == [1]
    parts = {p.name for p in newest(tmp_path / "run").iterdir()}
    assert parts >= {"discriminator", "disc_optimizer", "disc_lr_scheduler", "model", "optimizer"}


@pytest.mark.parametrize("ema", [False, True])
def test_a_checkpoints_masters_or_its_average_are_the_start(home: Path, tmp_path: Path, ema: bool) -> None:
    """With a learning rate of 0 what is saved after an update is what was loaded."""
    still: dict[str, Any] = {"lr": 0.0, "lr_scheduler": {"warmup_steps": 0}, "dtype": "bf16"}
    source = newest(home / "stage1")
    flag = ["--pretrained-ema"] if ema else []
    finished = train(home, tmp_path, "--from-pretrained", source, *flag, **still)
    assert finished.code == 0, finished.stderr
    assert ("the average of weights of" if ema else "the weights of") in finished.stderr
    got = load_file(newest(tmp_path / "run") / "master.safetensors")
    want = load_file(source / ("ema.safetensors" if ema else "master.safetensors"))
    for key, value in got.items():
        assert torch.equal(value, want[key.removeprefix("module.") if ema else key]), key


def test_starts_from_a_file(home: Path, tmp_path: Path) -> None:
    shard = next((newest(home / "stage1") / "model").glob("*.safetensors"))
    shutil.copy(shard, tmp_path / "weights.safetensors")
    finished = train(home, tmp_path, "--from-pretrained", tmp_path / "weights.safetensors")
    assert finished.code == 0, finished.stderr
    assert "starting from the weights in" in finished.stderr


def test_without_a_start_it_is_a_slip_unless_the_term_comes_later(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path)
    assert finished.code == 2
    assert "--from-pretrained outputs/RUN" in finished.stderr
    assert not (tmp_path / "run").exists()
    finished = train(home, tmp_path, gen_loss_config={"gen_start": 2})
    assert finished.code == 0, finished.stderr
    assert "the adversarial term joins at update 2" in finished.stderr


def test_a_first_stage_is_no_second_to_go_on_with(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, "--load", home / "stage1", max_steps=5)
    assert finished.code == 2
    assert "is of a first stage" in finished.stderr
    assert "--from-pretrained" in finished.stderr
    assert not (tmp_path / "run").exists()
    finished = train(home, tmp_path, "--load", home / "stage1", "--restart-disc", max_steps=5)
    assert finished.code == 0, finished.stderr
    assert [r["step"] for r in records(tmp_path / "run")] == [5]


def test_what_cannot_be_is_said_before_a_folder_is_made(home: Path, tmp_path: Path) -> None:
    sides = {"width_list": [8, 32], "depth_list": [1, 1], "block_type": "ResBlock"}
    other = {
        "type": "dc_ae",
        "latent_channels": 8,
        "encoder": {**sides, "temporal_downsample": [True, False]},
        "decoder": {**sides, "temporal_upsample": [True, False]},
    }
    cases: list[tuple[int, str, tuple[str | Path, ...], dict[str, Any]]] = [
        (4, "does not exist", ("--from-pretrained", "nowhere"), {}),
        (4, "are not those of this model", ("--from-pretrained", home / "stage1"), {"model": other}),
        (2, "has no part `encodr`", ("--from-pretrained", home / "stage1"), {"freeze_layers": "encodr"}),
        (2, "nothing of the model to train", ("--from-pretrained", home / "stage1"),
         {"freeze_layers": ["encoder", "decoder"]}),
        (2, "one value a channel", ("--from-pretrained", home / "stage1"),
         {"discriminator": {"n_layers": 5}, "bucket_config": {"32px_ar1:1": {8: [1.0, 1]}},
          "mixed_image_rule": "open_sora"}),
    ]  # fmt: skip
    for code, text, argv, changes in cases:
        finished = train(home, tmp_path, *argv, **changes)
        assert (finished.code, text in finished.stderr) == (code, True), (text, finished.stderr)
        assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_other_networks_is_not_gone_on_with(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path, "--from-pretrained", home / "stage1", name="first").code == 0
    load = ("--load", tmp_path / "first")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("`discriminator` is of another network", {"discriminator": {"ndf": 16}}),
        ("`freeze_layers` differs", {"freeze_layers": "encoder"}),
    ]
    for text, changes in cases:
        finished = train(home, tmp_path, *load, max_steps=2, **changes)
        assert (finished.code, text in finished.stderr) == (4, True), finished.stderr
        assert not (tmp_path / "run").exists()


def test_frozen_parts_stay_as_they_came(home: Path, tmp_path: Path) -> None:
    source = newest(home / "stage1")
    freeze = ("--from-pretrained", source, "--freeze-layers", "encoder")
    assert train(home, tmp_path, *freeze, max_steps=3, dtype="bf16").code == 0
    run = tmp_path / "run"
    old = {k.removeprefix("module."): v for k, v in load_file(source / "master.safetensors").items()}
    new = load_file(next((newest(run) / "model").glob("*.safetensors")))
    moved = {k for k in new if not torch.equal(new[k], old[k].bfloat16())}
    assert moved
    assert all(k.startswith("decoder.") for k in moved)
    masters = load_file(newest(run) / "master.safetensors")
    assert {k.split(".")[1] for k in masters} == {"decoder"}
    deep = osora("ckpt", "verify", run, "--deep", cwd=home)
    assert deep.code == 0, deep.stdout
    # The average covers what was trained; a reconstruction takes the rest from the weights.
    end = ("--dataset.data-path", "clips.csv", "--save-dir", tmp_path / "out", "--no-lpips", "--num-samples", "1")
    recon = osora("infer", "reconstruct", "demo/reconstruct", "--model.from-pretrained", run, *end, "--json", cwd=home)
    assert recon.code == 0, recon.stderr
    # The optimizer counts the trained parameters, so a resume cannot thaw any.
    refused = osora("resume", run, "--freeze-layers", "decoder", "--max-steps", "4", cwd=home)
    assert refused.code == 2
    assert "the optimizer counts the trained parameters" in refused.stderr


def test_what_is_logged(home: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optim_discriminator": {"lr": 3e-4}, "disc_lr_scheduler": {"warmup_steps": 0}}
    assert train(home, tmp_path, "--from-pretrained", home / "stage1", max_steps=2, **changes).code == 0
    record = records(tmp_path / "run")[-1]
    names = {
        "loss", "nll", "nll_per_pixel", "rec", "rec_per_pixel", "perceptual", "perceptual_sum", "kl", "gen_loss",
        "d_weight", "gen_factor", "disc_loss", "logits_real", "logits_fake", "grad_norm", "grad_norm_discriminator",
        "lr", "lr_disc", "skipped_updates", "skipped_updates_discriminator", "stills",
    }  # fmt: skip
    assert names <= set(record)
    assert record["lr_disc"] == 3e-4
    assert record["rec"] == pytest.approx(record["rec_per_pixel"] * 3 * 32 * 32, rel=1e-5)
    assert record["nll"] == pytest.approx(record["nll_per_pixel"] * 3 * 32 * 32, rel=1e-5)
    config = json.loads((tmp_path / "run" / "config.txt").read_text())
    assert config["discriminator"]["n_layers"] == 2


def test_the_weight_has_a_cap(home: Path, tmp_path: Path) -> None:
    for name, largest in (("free", 1e4), ("capped", 1e-3)):
        argv = ("--from-pretrained", home / "stage1", "--gen-loss-config.max-ratio", str(largest))
        assert train(home, tmp_path, *argv, name=name, gen_loss_config={"gen_start": 1, "disc_weight": 0.5}).code == 0
    free, capped = (records(tmp_path / name)[-1] for name in ("free", "capped"))
    assert free["d_weight"] > 1e-3
    assert capped["d_weight"] == pytest.approx(0.5e-3)
    assert capped["last_layer_norm_nll"] == free["last_layer_norm_nll"]
