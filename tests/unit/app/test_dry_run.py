"""What a training would take: memory from shapes, checkpoints as they come out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disc import write_disc_config
from support.process import osora
from support.tiny import make_table, write_config
from support.tiny_diffusion import write_config as write_diffusion
from torch.utils.checkpoint import checkpoint

from osora_cli.app.dry_run.estimate import GIB, checkpoint_bytes, estimate, traced_peaks
from osora_cli.app.dry_run.fit import memory_fault
from osora_cli.app.dry_run.live_memory import LiveMemory, fused_attention
from osora_cli.app.dry_run.meta_engine import MetaTrained
from osora_cli.app.dry_run.probes import make_probe
from osora_cli.app.dry_run.run import plan_saves
from osora_cli.app.dry_run.shapes import Shape, batch_shapes
from osora_cli.app.recipes import check_training
from osora_cli.app.train import train
from osora_cli.cli.dry_run import dry_run_lines
from osora_cli.config.load import load_config
from osora_cli.config.models.discriminator import GenLossConfig
from osora_cli.config.registry import COMMANDS
from osora_cli.config.schema import TrainConfig
from osora_cli.data.buckets import BucketTable


def config_of(command: str, preset: str, **changes: Any) -> TrainConfig:
    found = COMMANDS[command]
    loaded = load_config(preset, found.schema, default=found.default).config
    assert isinstance(loaded, TrainConfig)
    return loaded.model_copy(update=changes)


def test_live_memory_follows_every_tensor() -> None:
    x = torch.empty(1024, 1024, device="meta")
    w = torch.nn.Parameter(torch.empty(1024, 1024, device="meta"))
    one = x.numel() * 4
    with LiveMemory([x, w]) as memory:
        a = x @ w
        assert memory.live == one
        b = a.relu()
        assert memory.live == 2 * one
        view = b[:10]
        assert memory.live == 2 * one, "a view is no memory of its own"
        del view
        b.sum().backward()
        del a, b
    assert w.grad is not None
    assert memory.live == one, "only the gradient is left"
    assert 3 * one <= memory.peak <= 4 * one + 4096


def test_bf16_gradients_end_in_fp32() -> None:
    module = torch.nn.Linear(8, 4, device="meta")
    trained = MetaTrained(module, torch.bfloat16)
    for _ in range(2):
        trained.backward(module(torch.empty(2, 8, device="meta", dtype=torch.bfloat16)).sum())
    size = trained.size("model")
    assert (size.parameters, size.trained) == (36, 36)
    assert (size.weights, size.masters, size.gradients, size.moments) == (72, 144, 144, 288)
    assert all(p.grad is None for p in module.parameters())


def test_recomputation_and_length_change_the_peak_as_they_should() -> None:
    shape = Shape(1, 8, 64, 64)
    peaks = {}
    for recompute in (False, True):
        config = config_of("train vae", "demo/vae", grad_checkpoint=recompute)
        probe = make_probe("train vae", config)
        (peaks[recompute],) = traced_peaks(probe, shape)
    assert peaks[True] < 0.7 * peaks[False]
    (longer,) = traced_peaks(make_probe("train vae", config_of("train vae", "demo/vae")), Shape(1, 16, 64, 64))
    assert 1.6 * peaks[False] < longer < 2.1 * peaks[False]


def test_ranks_share_what_their_plugin_shares() -> None:
    def kinds(plugin: str, ranks: int) -> dict[str, int]:
        config = config_of("train vae", "demo/vae", plugin=plugin, dtype="bf16", ema_decay=0.99)
        return estimate(make_probe("train vae", config), config, [Shape(1, 8, 32, 32)], ranks).to_json()

    one = kinds("none", 1)
    assert one["masters"] == one["gradients"] == one["ema"] == one["optimizer"] // 2 == 2 * one["weights"]
    ddp, zero1, zero2, zero3 = (kinds(name, 4) for name in ("ddp", "zero1", "zero2", "zero3"))
    assert all(ddp[kind] == one[kind] for kind in ("weights", "masters", "gradients"))
    assert (zero1["optimizer"], zero1["gradients"]) == (one["optimizer"] // 4, one["gradients"])
    assert (zero2["gradients"], zero2["weights"]) == (one["gradients"] // 4, one["weights"])
    assert zero3["weights"] == one["weights"] // 4
    assert one["checkpoint"] == zero3["checkpoint"], "a checkpoint is the same whoever shares what"


@pytest.mark.parametrize(
    ("changes", "count", "kept"),
    [
        ({"ckpt_every": 0}, 1, 1),
        ({"ckpt_every": 10, "keep_n_latest": -1}, 10, 10),
        ({"ckpt_every": 30, "keep_n_latest": 2}, 4, 2),
        ({"ckpt_every": 10, "keep_n_latest": 2, "keep_every": 50}, 10, 4),
    ],
)
def test_planned_checkpoints(tmp_path: Path, changes: dict[str, Any], count: int, kept: int) -> None:
    plan = plan_saves(config_of("train vae", "demo/vae", **changes), 100, 10**6, tmp_path / "none")
    assert (plan.count, plan.kept) == (count, kept)
    assert plan.bytes_at_most == 10**6 * (kept + (count > kept))
    assert plan.seconds_each is not None
    assert plan.seconds_each > 0
    assert not list(tmp_path.iterdir())


def test_a_second_shape_is_traced_as_the_first() -> None:
    probe = make_probe("train vae", config_of("train vae", "demo/vae", dtype="bf16"))
    assert traced_peaks(probe, Shape(1, 8, 32, 32)) == traced_peaks(probe, Shape(1, 8, 32, 32))


def test_attention_is_traced_without_the_matrix_of_all_pairs() -> None:
    q, k, v = (torch.empty(1, 4, 2048, 32, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    one = q.numel() * 2

    def attend() -> torch.Tensor:
        out = checkpoint(torch.nn.functional.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return out

    with fused_attention(), LiveMemory([q, k, v]) as memory:
        attend().sum().backward()
    assert all(tensor.grad is not None for tensor in (q, k, v))
    assert memory.peak < 8 * one < 4 * 2048 * 2048 * 2
    plain = torch.ones(1, 1, 4, 8)
    with fused_attention():
        assert torch.nn.functional.scaled_dot_product_attention(plain, plain, plain).equal(plain)


def test_stills_are_a_shape_of_their_own() -> None:
    def shapes(**changes: Any) -> list[Shape]:
        config = config_of("train vae", "vae/train/video_dc_ae", **changes)
        buckets = BucketTable({"128px_ar3:2": {64: (1.0, 1)}, "256px_ar1:1": {32: (1.0, 2)}}, 32).buckets
        return batch_shapes(config, buckets)

    clips = Shape(2, 32, 256, 256)
    assert shapes() == [clips, Shape(64, 1, 256, 256)]
    assert shapes(mixed_image_rule="open_sora") == shapes(mixed_image_ratio=0.0) == [clips]
    assert shapes(mixed_strategy="mixed_video_random") == shapes(mixed_strategy=None) == [clips]
    assert batch_shapes(config_of("train diffusion", "demo/diffusion"), []) == []


# Most memory that torch held on an H200, dc-ae-f32t4c128 in bf16 with its kernels, LPIPS, EMA, one clip an update.
# Measured; docs/performance.md. (command, preset, settings, GiB)
MEASURED = [
    ("train vae", "video_dc_ae", {}, 42.7),  # a fifth of the batches stills
    ("train vae-disc", "video_dc_ae_disc", {"grad_checkpoint": False, "mixed_strategy": None}, 46.1),
    ("train vae", "video_dc_ae_96f", {}, 33.2),
    ("train vae", "video_dc_ae_512px", {}, 41.6),
]


@pytest.mark.parametrize(
    ("command", "preset", "changes", "measured"),
    [*MEASURED[:2], *(pytest.param(*row, marks=pytest.mark.sweep) for row in MEASURED[2:])],
)
def test_estimate_is_near_what_was_measured(
    command: str, preset: str, changes: dict[str, Any], measured: float
) -> None:
    config = config_of(command, f"vae/train/{preset}", **changes)
    table = BucketTable(config.bucket_config, 32)
    total = estimate(make_probe(command, config), config, batch_shapes(config, table.buckets)).total / GIB
    print(f"{preset}: {total:.1f} GiB estimated, {measured} measured")
    assert total == pytest.approx(measured, rel=0.2)


def test_what_does_not_fit_is_said_by_kind_with_cures() -> None:
    config = config_of("train vae", "demo/vae", dtype="bf16", grad_checkpoint=False)
    memory = replace(
        estimate(make_probe("train vae", config), config, [Shape(2, 8, 32, 32)]),
        weights=2 * GIB, masters=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, ema=0, frozen=0,
        activations=20 * GIB, workspaces=GIB,
    )  # fmt: skip
    assert memory_fault(memory, config, 1, None) is None
    assert memory_fault(memory, config, 1, 39 * GIB) is None
    fault = memory_fault(memory, config, 1, 24 * GIB) or ""
    assert "a step of 2 x 8 frames of 32x32 px is estimated to take 39.0 GiB and the GPU has 24.0 GiB" in fault
    assert "(weights 2.0, fp32 copies of them 4.0, gradients 4.0, optimizer 8.0, activations 20.0" in fault
    assert "average" not in fault
    assert fault.endswith(
        ": `--grad-checkpoint`, a smaller batch or bucket in `bucket_config`, or more GPUs with `--plugin zero2`"
    )

    def cures(ranks: int, **changes: Any) -> str:
        return (memory_fault(memory, config.model_copy(update=changes), ranks, 24 * GIB) or "").split("): ")[1]

    assert "grad-checkpoint" not in cures(1, grad_checkpoint=True)
    assert "`--dtype bf16`" in cures(1, dtype="fp32")
    assert "or `--plugin zero2`" in cures(4, plugin="ddp")
    assert "or `--plugin zero3`" in cures(4, plugin="zero2")
    assert cures(4, plugin="zero3").endswith("or more GPUs")


@pytest.mark.parametrize("command", ["train vae", "train vae-disc", "train diffusion"])
def test_a_gpu_that_is_too_small_is_told_before_anything_is_built(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device's memory is the seam; the training ends where its networks would be made."""
    changes: dict[str, Any] = {"exp_name": "run", "outputs": str(tmp_path / "outputs"), "num_workers": 0}
    if command == "train vae-disc":
        changes["gen_loss_config"] = GenLossConfig(gen_start=100)
    if command == "train diffusion":
        preset = str(write_diffusion(tmp_path))
    else:
        preset = "demo/vae" if command == "train vae" else "demo/vae_disc"
    config = config_of(command, preset, **changes)
    dataset = config.dataset.model_copy(update={"data_path": str(make_table(tmp_path))})
    config = config.model_copy(update={"dataset": dataset})

    class Built(Exception):
        pass

    def build(*_: object) -> None:
        raise Built(capsys.readouterr().err)

    kind = type(check_training(command, config))
    monkeypatch.setattr(kind, "build", build)
    for available in (10**6, 10**12):
        monkeypatch.setattr("osora_cli.app.train.device_bytes", lambda _, have=available: have)
        with pytest.raises(Built) as told:
            train(command, config, config_name="demo", quiet=True)
        assert ("and the GPU has 0.0 GiB (" in str(told.value)) == (available < 10**9)
        shutil.rmtree(tmp_path / "outputs")


def test_dry_run_of_both_stages(tmp_path: Path) -> None:
    """Nothing is made, and the checkpoint that a real training then writes has the size that was told."""
    table = make_table(tmp_path)
    argv = ["train", "vae", str(write_config(tmp_path, dtype="bf16")), "--dataset.data-path", str(table),
            "--max-steps", "1", "--num-workers", "0", "--exp-name", "run", "--ema-decay", "0.9"]  # fmt: skip
    told = osora(*argv, "--dry-run", "--json", cwd=tmp_path)
    assert told.code == 0, told.stderr
    plan = told.json()
    assert not (tmp_path / "outputs").exists()
    assert plan["networks"][0]["parameters"] > 0
    assert plan["updates"] == 1
    lines = "\n".join(dry_run_lines({**plan, "gpu_bytes": 24 * GIB}))
    assert f"{plan['memory_bytes']['total'] / 2**20:.2f} MiB of 24.0 GiB" in lines, "a small model's in MiB"
    assert "GiB" not in "\n".join(dry_run_lines(plan))
    assert osora(*argv, cwd=tmp_path).code == 0
    (folder,) = (tmp_path / "outputs" / "run").glob("epoch*")
    real = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    # Headers and small files are 4 % of so small a checkpoint.
    assert 0.95 < plan["saves"]["bytes_each"] / real < 1.01
    disc = str(write_disc_config(tmp_path))
    second = osora("train", "vae-disc", disc, "--dataset.data-path", str(table), "--dry-run", "--json",
                   "--from-pretrained", "outputs/run", "--nproc", "4", cwd=tmp_path)  # fmt: skip
    assert second.code == 0, second.stderr
    assert [network["name"] for network in second.json()["networks"]] == ["model", "discriminator"]
    missing = osora("train", "vae", "demo/vae", "--dataset.data-path", "none.csv", "--dry-run", cwd=tmp_path)
    assert missing.code == 3


def test_dry_run_of_a_large_diffusion_model_takes_no_memory() -> None:
    config = config_of("train diffusion", "stage1", cached_video=True)
    probe = make_probe("train diffusion", config)
    size = probe.engine.trained[0].size("model")
    assert 11.8e9 < size.parameters < 12e9
    assert size.trained == size.parameters
    # bf16 weights, fp32 masters and two moments: 14 bytes a parameter
    assert checkpoint_bytes(config, [size]) == pytest.approx(14 * size.parameters, rel=1e-3)
