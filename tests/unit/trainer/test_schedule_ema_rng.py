"""Learning rate, weight average and generator states."""

import json
import random

import numpy as np
import pytest
import torch

from osora_cli.tensors import TensorShard
from osora_cli.trainer import rng
from osora_cli.trainer.ema import Ema, follower
from osora_cli.trainer.schedule import Schedule


def test_warm_up_series() -> None:
    schedule = Schedule(base_lr=5e-5, warmup_steps=4)
    assert [schedule.lr(s) for s in range(6)] == pytest.approx([1.08e-5, 2.06e-5, 3.04e-5, 4.02e-5, 5e-5, 5e-5])


def test_no_warm_up_is_constant_from_the_first_update() -> None:
    assert [Schedule(base_lr=1e-4).lr(s) for s in (0, 1, 1000)] == [1e-4] * 3


def test_cosine_rises_linearly_and_ends_at_zero() -> None:
    schedule = Schedule(base_lr=1.0, warmup_steps=2, cosine=True, total=12)
    assert [schedule.lr(s) for s in (0, 1, 2, 7, 12, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_schedule_state_is_plain_and_complete() -> None:
    state = Schedule(base_lr=5e-5, warmup_steps=4).state(2)
    assert json.loads(json.dumps(state)) == state
    assert (state["last_epoch"], state["base_lrs"], state["warmup_steps"]) == (2, [5e-5], 4)
    assert state["_last_lr"] == pytest.approx([3.04e-5])


@pytest.mark.parametrize(("decay", "want"), [(0.99, 1.49999), (0.999, 1.43242), (0.9999, 1.09054)])
def test_average_moves_at_any_decay(decay: float, want: float) -> None:
    """Kept in bf16 these stay at 1."""
    master = torch.ones(3)
    ema = Ema([TensorShard.whole("w", master)], decay)
    master.fill_(1.5)
    for _ in range(2000):
        ema.update(torch.zeros(()))
    shard = ema.shards()[0]
    assert shard.dtype is torch.float32
    torch.testing.assert_close(shard.tensor, torch.full((3,), want), atol=2e-4, rtol=0)


def test_average_stands_still_on_a_skipped_update() -> None:
    master = torch.ones(3)
    ema = Ema([TensorShard.whole("w", master)], 0.5)
    master.fill_(2.0)
    ema.update(torch.ones(()))
    assert torch.equal(ema.shards()[0].tensor, torch.ones(3))
    ema.update(torch.zeros(()))
    assert torch.equal(ema.shards()[0].tensor, torch.full((3,), 1.5))


def test_the_one_pass_rule_is_the_average_and_stands_still_too() -> None:
    """What a GPU takes for all tensors at once, here by the kernel for the CPU."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(shape, generator=generator) for shape in ((3, 5, 7), (11,), ())]
    averages = [torch.randn(m.shape, generator=generator) for m in masters]
    wanted = [a.lerp(m, 1 - 0.99) for a, m in zip(averages, masters, strict=True)]
    rule = follower(list(zip(averages, masters, strict=True)), 0.99)
    for skipped in (0.0, 1.0):
        rule.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
        rule.step()
        torch.testing.assert_close(averages, wanted, rtol=1e-6, atol=1e-7)


def test_generator_states_survive_json() -> None:
    rng.seed_everything(7)
    random.random(), np.random.rand(), torch.rand(1), random.gauss(0, 1)
    kept = json.loads(json.dumps(rng.capture()))
    drawn = (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(3).tolist())
    rng.seed_everything(99)
    rng.restore(kept)
    assert (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(3).tolist()) == drawn
