"""`engine: colossalai` on one GPU: like the native engine, and their checkpoints load into each other bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dc_ae import light_config, lively
from torch import Tensor

from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.engine.base import OptimSettings, Trained
from osora_cli.engine.native import make_engine
from osora_cli.engine.settings import PluginSettings
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.state import Progress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(
        importlib.util.find_spec("colossalai") is None, reason="colossalai is not installed: docs/engines.md"
    ),
    # ColossalAI's own, by the dozen.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
OPTIM = OptimSettings(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)


class Task:
    """As much of a task as a save needs."""

    def __init__(self, trained: Trained) -> None:
        self.networks = {"model": trained}

    def schedule_states(self, update: int) -> dict[str, dict[str, Any]]:
        return {"lr_scheduler": {"last_epoch": update}}


def prepared(engine: str, plugin: str, dtype: str, seed: int = 0, **settings: Any) -> Trained:
    made = make_engine(
        engine=engine, plugin=plugin, dtype=dtype, device="cuda", deterministic=False,
        settings=PluginSettings(**settings),
    )  # fmt: skip
    assert made.name == engine
    return made.prepare(lively(DcAe(light_config(time=2, space=4)), seed), OPTIM)


def train(trained: Trained, updates: int, scale: float = 1.0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each update, on clips drawn from its number."""
    out = []
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        video = (torch.rand(2, 3, 4, 32, 32, generator=generator) * 2 - 1).cuda()
        reconstruction, _, _ = trained.module(video.to(trained.compute_dtype))
        loss = (reconstruction.float() - video).abs().mean() * scale
        trained.backward(loss)
        result = trained.update(1e-3, 0.5)
        out.append((float(loss), float(result.grad_norm)))
    return out


def groups(state: RunState) -> dict[str, dict[str, Tensor]]:
    contents = state.contents(Progress(0, 3, 3, 3), {"epoch": 0}, 2, {})
    return {
        g: {s.key: s.tensor.detach().reshape(-1).cpu().clone() for s in shards}
        for g, shards in contents.sharded.items()
    }


def run_state(trained: Trained) -> RunState:
    return RunState(Task(trained), Ema(trained.master_shards(), 0.5), True)  # type: ignore[arg-type]


def save(state: RunState, run: Path) -> Path:
    run.mkdir()
    store = CheckpointStore(run, async_io=True)
    store.save(state.contents(Progress(0, 3, 3, 3), {"epoch": 0}, 2, {}))
    store.before_update()
    store.finish()
    store.close()
    return run / "epoch0-global_step3"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_it_trains_as_the_native_engine_does(plugin: str, dtype: str) -> None:
    native = train(prepared("native", plugin, dtype), 5)
    other = train(prepared("colossalai", plugin, dtype), 5)
    relative = 1e-4 if dtype == "fp32" else 2e-2
    for (loss, norm), (loss_c, norm_c) in zip(native, other, strict=True):
        assert loss_c == pytest.approx(loss, rel=relative)
        assert norm_c == pytest.approx(norm, rel=10 * relative)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("colossalai", "native"), ("native", "colossalai")])
def test_a_checkpoint_of_one_engine_is_one_of_the_other(first: str, second: str, dtype: str, tmp_path: Path) -> None:
    trained = prepared(first, "zero2", dtype)
    train(trained, 3)
    state = run_state(trained)
    expected = groups(state)
    checkpoint = save(state, tmp_path / "run")
    other = run_state(prepared(second, "zero2", dtype, seed=1))
    other.load(CheckpointReader(checkpoint))
    got = groups(other)
    assert got.keys() == expected.keys()
    for group, tensors in expected.items():
        assert list(got[group]) == list(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(got[group][key], tensor), (group, key)
    train(other.task.networks["model"], 1)


@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_gradients_that_are_not_finite_change_nothing(plugin: str) -> None:
    trained = prepared("colossalai", plugin, "bf16")
    train(trained, 1)
    before = groups(run_state(trained))
    ((_, norm),) = train(trained, 1, scale=float("inf"))
    assert norm != norm or norm == float("inf")
    after = groups(run_state(trained))
    assert all(torch.equal(before[g][k], t) for g, tensors in after.items() for k, t in tensors.items())


def test_parameters_gathered_while_the_next_step_begins() -> None:
    plain = train(prepared("colossalai", "zero2", "bf16"), 4)
    overlapped = train(prepared("colossalai", "zero2", "bf16", overlap_allgather=True), 4)
    assert [loss for loss, _ in overlapped] == pytest.approx([loss for loss, _ in plain], rel=1e-3)


def test_micro_batches_of_stage_1_add_up() -> None:
    trained = prepared("colossalai", "zero1", "fp32")
    video = (torch.rand(4, 3, 4, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1).cuda()

    def backward(part: Tensor, share: float) -> None:
        trained.backward((trained.module(part)[0] - part).abs().mean() * share)

    with trained.no_sync():
        backward(video[:2], 0.5)
    backward(video[2:], 0.5)
    halves = float(trained.update(0.0, 0.0).grad_norm)
    backward(video, 1.0)
    assert float(trained.update(0.0, 0.0).grad_norm) == pytest.approx(halves, rel=1e-4)
