"""A training step on CUDA: nothing in it waits for the device, and the average follows in one pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny_task import clips, made, perceptual

from osora_cli.tensors import TensorShard
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.meter import Meter
from osora_cli.trainer.skips import Skips
from osora_cli.trainer.task import StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_never_waits_for_the_device(stage: int) -> None:
    task = made(stage, "bf16", lpips=perceptual().cuda(), device="cuda:0")
    ema = Ema(task.networks["model"].master_shards(), 0.9)
    skips = Skips(task.networks, {}, torch.device("cuda:0"))
    for update in range(4):
        given = clips(update)
        given = replace(given, video=given.video.pin_memory())
        # The first steps choose kernels and grow the memory pool.
        torch.cuda.set_sync_debug_mode("error" if update > 1 else "default")
        try:
            meter = Meter()
            meter.add(given, task.micro_step(given, StepContext(3, update, 0, 1, 0, 1)))
            results = task.update(update)
            ema.update(results["model"].skipped)
            skips.add(results)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not any(skips.counts().values())


def test_the_average_of_a_gpu_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 32, 3, 3, 3), (7,), (), (1, 129))
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    moved = [torch.randn(shape, generator=generator) for shape in shapes]
    averages = []
    for device in ("cpu", "cuda"):
        masters = [t.to(device, copy=True) for t in start]
        ema = Ema([TensorShard.whole(str(i), m) for i, m in enumerate(masters)], 0.99)
        for master, value in zip(masters, moved, strict=True):
            master.copy_(value)
        for skipped in (0.0, 1.0, 0.0):
            ema.update(torch.tensor(skipped, device=device))
        averages.append([shard.tensor.cpu() for shard in ema.shards()])
    torch.testing.assert_close(averages[1], averages[0], rtol=1e-6, atol=1e-7)
