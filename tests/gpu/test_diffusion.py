"""Diffusion training on a GPU: recomputed blocks in host memory, and steps that repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mmdit import inputs_for, small_model
from support.tiny_diffusion import CONFIG, HUNYUAN, MODEL
from torch import Tensor

from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine
from osora_cli.model.build import build_model
from osora_cli.model.latents import FrozenParts, null_text
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.host_buffer import HostBuffer
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion import DiffusionTask, DiffusionTaskSettings
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def gradients(model: MMDiT, buffer: HostBuffer | None) -> dict[str, Tensor]:
    model.zero_grad()
    model.enable_grad_checkpoint(True, buffer)
    inputs = {name: value.cuda() for name, value in inputs_for(model.config, (4, 16, 16)).items()}
    model(**inputs).square().mean().backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capacity", [1 << 18, 1 << 30])
def test_inputs_in_page_locked_memory_give_the_same_gradients(capacity: int) -> None:
    model = small_model().cuda()
    want = gradients(model, None)
    buffer = HostBuffer(capacity)
    for _ in range(3):
        got = gradients(model, buffer)
        # Not bit for bit: attention's backward adds up in the order in which its blocks happen to end.
        assert all(float((got[k] - v).abs().max()) <= 1e-5 * float(v.abs().max()) + 1e-8 for k, v in want.items())
    assert 0 < buffer.used <= capacity


def updated(device: torch.device, dtype: str, frames: int, edge: int) -> tuple[list[float], list[Tensor]]:
    """Losses and fp32 weights of two updates from the same start."""
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    networks: Any = [
        build_model(section, device=device, dtype=compute) for section in (HUNYUAN, CONFIG["t5"], CONFIG["clip"])
    ]
    networks[0].reset_parameters(0)
    parts = FrozenParts(*networks)
    engine = NativeEngine(device, dtype, "none", deterministic=True)
    model = build_model({**MODEL, "cond_embed": True})
    model.reset_parameters(0)
    network = engine.prepare(model, OptimSettings(1e-3, (0.9, 0.999), 1e-15, 0.0))
    settings = DiffusionTaskSettings(
        patch_size=2, rules=LatentRules(4, causal=True), sigma_min=1e-5, dropout_t5=0.3, dropout_clip=0.3,
        condition_weights={"t2v": 1.0, "i2v_head": 1.0, "i2v_loop": 1.0}, no_reference_loss=True, guidance=None,
        grad_clip=1.0,
    )  # fmt: skip
    task = DiffusionTask(network, engine, Schedule(1e-3), settings, parts, null_text(parts))
    video = torch.randint(0, 256, (4, 3, frames, edge, edge), generator=torch.Generator().manual_seed(1))
    rows = (0, 1, 2, 3)
    batch = ClipBatch(
        video=video.to(torch.uint8), rows=rows, positions=rows, texts=("a", "b", "c", "d"), fps=(24.0,) * 4,
        motion_scores=(float("nan"),) * 4, replaced=(), shortened=(), wait_s=0.0,
    )  # fmt: skip
    losses = []
    for update in range(2):
        place = StepContext(seed=1, update=update, micro=0, accumulation=1, rank=0, world_size=1)
        losses.append(float(task.micro_step(batch, place)["loss"]))
        task.update(update)
    return losses, [shard.tensor.clone() for shard in network.master_shards()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_are_the_same_each_time_they_are_made(dtype: str) -> None:
    """65 frames of 128 px are 1,088 tokens: several blocks of attention's backward, whose order would show."""
    first, second = (updated(torch.device("cuda", 0), dtype, 65, 128) for _ in range(2))
    assert first[0] == second[0]
    assert len({*first[0]}) == 2
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
