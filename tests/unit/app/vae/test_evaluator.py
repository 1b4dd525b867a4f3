"""What an evaluation of an autoencoder computes, over any number of ranks, and what it leaves alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.clips import real_clip
from support.ranks import ThreadComm, run_ranks
from support.tables import clip_row, make_table
from support.tiny import CONFIG

from osora_cli.app.vae.evaluator import EvalInput, VaeEvaluator, check_eval_input
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine
from osora_cli.errors import DataError
from osora_cli.metrics.baseline import block_mean_psnr
from osora_cli.metrics.psnr import psnr
from osora_cli.metrics.ssim import ssim
from osora_cli.model.build import build_model
from osora_cli.model.perceptual import LPIPS
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.evaluation import Evaluation


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ClipTable:
    rows = [clip_row(real_clip(name)) for name in ("carphone_pristine", "bikes", "bigbuckbunny")]
    return make_table(tmp_path_factory.mktemp("table"), rows)


def config(table: ClipTable, **changes: Any) -> TrainVaeConfig:
    given = {**CONFIG, "dataset": {"data_path": str(table.source)}, "eval_every": 10, "dtype": "fp32", **changes}
    return TrainVaeConfig(**{**given, "eval": {"number": 5, "lpips": False, **changes.get("eval", {})}})


class Rank:
    """An engine of one of several threads: what an evaluator asks of it."""

    def __init__(self, comm: ThreadComm) -> None:
        self._comm = comm
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, torch.device("cpu")

    def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._comm.gather(values)).mean(dim=0)


@dataclass
class State:
    """A network under training and its average."""

    task: Any
    ema: Ema | None


@dataclass
class Task:
    networks: dict[str, Any]


def network_state(dtype: str = "fp32", ema: bool = True) -> State:
    """A network whose average is that of other weights."""
    engine = NativeEngine(torch.device("cpu"), dtype, "none")
    module = build_model(TrainVaeConfig(**CONFIG).model, device="cpu", seed=1)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(6)
    network = engine.prepare(module, OptimSettings(1e-3, (0.9, 0.98), 1e-8, 0.0))
    average = Ema(network.master_shards(), 0.9) if ema else None
    with torch.no_grad():
        for shard in network.master_shards():
            shard.tensor.add_(0.02 * torch.randn(shard.tensor.shape, generator=torch.Generator().manual_seed(3)))
    network.masters_changed()
    network.module.train()
    return State(Task({"model": network}), average)


def one_rank() -> Any:
    return NativeEngine(torch.device("cpu"), "fp32", "none")


def scores(found: Evaluation) -> dict[str, float]:
    return {k: v for k, v in found.scores.items() if k != "time_s"}


def direct(given: EvalInput, state: State) -> dict[str, float]:
    """The scores clip by clip, with nothing of the evaluator."""
    network = state.task.networks["model"]
    rows = []
    for clip in given.clips:
        video = normalize(clip.read()[None])
        with torch.no_grad():
            rebuilt, _, latent = network.module(video.to(network.compute_dtype))
        a, b = (video + 1) / 2, ((rebuilt.float() + 1) / 2).clamp(0, 1)
        (means,) = block_mean_psnr(a, latent.shape[1:], 1.0)
        rows.append([float(psnr(a, b, 1.0)), float(ssim(a, b, 1.0)), means.psnr])
    return dict(zip(("psnr", "ssim", "psnr_block_means"), np.mean(rows, axis=0), strict=True))


def check_input(settings: TrainVaeConfig, table: ClipTable) -> EvalInput:
    given = check_eval_input(settings, table)
    assert given is not None
    return given


def test_scores_are_means_over_the_clips_of_weights_and_average(table: ClipTable) -> None:
    settings, state = config(table), network_state()
    given = check_input(settings, table)
    found = VaeEvaluator(settings, given, one_rank(), state).evaluate(10)  # type: ignore[arg-type]
    raw = direct(given, state)
    assert state.ema is not None
    with state.ema.swapped(state.task.networks["model"]):
        average = direct(given, state)
    for name in ("psnr", "ssim"):
        assert found.scores[f"{name}_raw"] == pytest.approx(raw[name], abs=1e-4)
        assert found.scores[f"{name}_ema"] == pytest.approx(average[name], abs=1e-4)
    assert found.scores["psnr_raw"] != pytest.approx(found.scores["psnr_ema"], abs=1e-3)
    assert found.scores["psnr_block_means"] == pytest.approx(raw["psnr_block_means"], abs=1e-6)
    assert found.pictures["clips"].dtype == np.uint8


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_share_the_clips_and_agree(table: ClipTable, ranks: int) -> None:
    """Of five clips: seven ranks leave two without any, which still take part."""
    settings = config(table, eval={"raw_weights": False})
    given = check_input(settings, table)
    whole = VaeEvaluator(settings, given, one_rank(), network_state())  # type: ignore[arg-type]
    expected = whole.evaluate(10)

    def body(comm: ThreadComm) -> tuple[Evaluation, int]:
        evaluator = VaeEvaluator(settings, given, Rank(comm), network_state())  # type: ignore[arg-type]
        return evaluator.evaluate(10), len(evaluator._batches)

    found: Any = run_ranks(ranks, body)
    assert not [e for e in found if isinstance(e, Exception)], found
    assert len({batches for _, batches in found}) == 1, "equally many calls of the network"
    for evaluation, _ in found:
        assert scores(evaluation) == pytest.approx(scores(expected), abs=1e-4)
    assert [bool(e.pictures) for e, _ in found] == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nothing_is_changed(table: ClipTable, dtype: str) -> None:
    settings, state = config(table, dtype=dtype), network_state(dtype)
    network, ema = state.task.networks["model"], state.ema
    assert ema is not None
    evaluator = VaeEvaluator(settings, check_input(settings, table), one_rank(), state)  # type: ignore[arg-type]

    def bits() -> list[bytes]:
        tensors = [*network.model_shards(), *network.master_shards(), *network.optimizer_shards(), *ema.shards()]
        return [s.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for s in tensors if s.tensor.dim()]

    before, modes = bits(), [m.training for m in network.module.modules()]
    states = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    evaluator.evaluate(10)
    assert bits() == before
    assert [m.training for m in network.module.modules()] == modes
    after = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    assert after == states
    assert all(p.grad is None for p in network.module.parameters())


def test_lpips_and_a_network_that_gives_no_numbers(table: ClipTable) -> None:
    """With an LPIPS net of drawn weights: how it is called is what is looked at."""
    torch.manual_seed(0)
    settings, state = config(table, eval={"number": 2, "pictures": 0}), network_state(ema=False)
    given = check_input(settings, table)
    net = LPIPS()
    found = VaeEvaluator(settings, EvalInput(given.clips, net), one_rank(), state).evaluate(1)  # type: ignore[arg-type]
    network = state.task.networks["model"]
    values = []
    for clip in given.clips:
        video = normalize(clip.read()[None])
        with torch.no_grad():
            rebuilt = network.module(video)[0].clamp(-1, 1)
        values.append(float(net(video[0].transpose(0, 1), rebuilt[0].transpose(0, 1)).mean()))
    assert found.scores["lpips_raw"] == pytest.approx(np.mean(values), rel=1e-3)
    assert "psnr_ema" not in found.scores
    assert found.pictures == {}
    with torch.no_grad():
        next(iter(network.module.parameters())).fill_(float("nan"))
    broken = VaeEvaluator(settings, EvalInput(given.clips, net), one_rank(), state).evaluate(2)  # type: ignore[arg-type]
    assert set(broken.scores) == {"psnr_block_means", "psnr_constant_colour", "time_s"}


def test_the_clips_come_from_the_held_out_table(table: ClipTable, tmp_path: Path) -> None:
    held = make_table(tmp_path, [clip_row(real_clip("carphone_distorted"))])
    given = check_input(config(table, eval={"table": str(held.source)}), table)
    assert {Path(c.path).stem for c in given.clips} == {"carphone_distorted"}
    assert any("5 windows of 8 frames, 1 held-out clip" in note for note in given.notes)
    own = check_input(config(table), table)
    assert any("clips trained on as well" in note for note in own.notes)
    assert check_eval_input(config(table, eval_every=0), table) is None
    with pytest.raises(DataError):
        check_eval_input(config(table, eval={"table": str(tmp_path / "none.csv")}), table)
