"""What a training would take: memory from shapes, checkpoints as they come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.process import osora
from support.tiny import make_table

from osora_cli.app.dry_run.estimate import GIB, checkpoint_bytes, estimate, traced_peak
from osora_cli.app.dry_run.live_memory import LiveMemory
from osora_cli.app.dry_run.meta_engine import MetaTrained
from osora_cli.app.dry_run.probes import Shape, make_probe
from osora_cli.app.dry_run.run import memory_fault, plan_saves
from osora_cli.config.load import load_config
from osora_cli.config.registry import COMMANDS
from osora_cli.config.schema import TrainConfig


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
        peaks[recompute] = traced_peak(probe, shape)
    assert peaks[True] < 0.7 * peaks[False]
    longer = traced_peak(make_probe("train vae", config_of("train vae", "demo/vae")), Shape(1, 16, 64, 64))
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


def test_what_does_not_fit_is_said() -> None:
    assert memory_fault(40 * GIB, None) is None
    assert memory_fault(40 * GIB, 80 * GIB) is None
    assert "40.0 GiB and the GPU has 24.0 GiB: `--grad-checkpoint`" in (memory_fault(40 * GIB, 24 * GIB) or "")


def test_dry_run_of_both_stages(tmp_path: Path) -> None:
    """Nothing is made, and the checkpoint that a real training then writes has the size that was told."""
    table = make_table(tmp_path)
    argv = ["train", "vae", "demo/vae", "--dataset.data-path", str(table), "--max-steps", "1", "--num-workers", "0",
            "--dtype", "bf16", "--exp-name", "run", "--ema-decay", "0.9"]  # fmt: skip
    told = osora(*argv, "--dry-run", "--json", cwd=tmp_path)
    assert told.code == 0, told.stderr
    plan = told.json()
    assert not (tmp_path / "outputs").exists()
    assert plan["networks"][0]["parameters"] > 0
    assert plan["updates"] == 1
    assert osora(*argv, cwd=tmp_path).code == 0
    (folder,) = (tmp_path / "outputs" / "run").glob("epoch*")
    real = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert 0.97 < plan["saves"]["bytes_each"] / real < 1.03
    second = osora("train", "vae-disc", "demo/vae_disc", "--dataset.data-path", str(table), "--dry-run", "--json",
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
