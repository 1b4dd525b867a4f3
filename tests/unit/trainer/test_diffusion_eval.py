"""Scoring of a diffusion model: fixed times and noise, samples beside their clips, and nothing moved by it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.clips import pictures
from support.golden import seeded_randn
from support.tiny_cache import cache_config
from support.tiny_diffusion import CAUSAL

from osora_cli.app.diffusion.start import build_mmdit
from osora_cli.app.frozen_parts import build_frozen_parts
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.data.media import probe
from osora_cli.data.transforms import normalize
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import make_engine
from osora_cli.model.flow import shift_time
from osora_cli.model.latents import encode_latents, null_text
from osora_cli.model.sampling import SamplingSettings
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion_eval import (
    DiffusionEvalSettings,
    DiffusionEvaluator,
    EvalClip,
    match_scores,
    quantile_times,
    strip,
    to_pixels,
)
from osora_cli.trainer.ema import Ema

CPU = torch.device("cpu")
IMAGE = {**CAUSAL, "bucket_config": {"32px_ar2:1": {9: [1.0, 1]}}}


def clips(count: int, frames: int) -> list[EvalClip]:
    made = []
    for i in range(count):
        video = torch.from_numpy(pictures(frames, (64, 48), first=1 + 97 * i))[:, :32, :32].permute(3, 0, 1, 2)
        made.append(EvalClip(f"sample{i}", video.contiguous(), f"clip {i}", 8.0))
    return made


def evaluator_of(
    config: TrainDiffusionConfig, folder: Path, count: int = 3, frames: int = 8, **changes: Any
) -> tuple[DiffusionEvaluator, Any, Any]:
    """The evaluator, its network and the average; weights and average differ."""
    engine = make_engine(engine="native", plugin="none", dtype="fp32", device="cpu", deterministic=False)
    network = engine.prepare(build_mmdit(config, None, CPU, []), OptimSettings(1e-3, (0.9, 0.999), 1e-8, 0.0))
    ema = Ema(network.master_shards(), 0.9)
    for shard in ema.shards():
        shard.tensor.mul_(0.9)
    parts = build_frozen_parts(config, CPU, torch.float32)
    settings = DiffusionEvalSettings(
        every=2,
        patch_size=2,
        cond_embed=config.model.cond_embed,
        guidance=None,
        sigma_min=1e-5,
        rules=LatentRules(*((4, True) if config.model.cond_embed else (2, False))),
        sampling=SamplingSettings(num_steps=2),
        **changes,
    )
    state: Any = SimpleNamespace(task=SimpleNamespace(networks={"model": network}), ema=ema)
    made = DiffusionEvaluator(settings, clips(count, frames), engine, state, parts, null_text(parts), folder)
    return made, network, ema


@pytest.fixture
def config(tmp_path: Path) -> TrainDiffusionConfig:
    return cache_config(tmp_path / "none.csv")


def test_quantiles_are_the_middles_of_equal_shares_of_what_training_draws() -> None:
    times = quantile_times(5, 2.5)
    drawn = shift_time(torch.sigmoid(torch.randn(200_000, generator=torch.Generator().manual_seed(1))), 2.5)
    expected = torch.quantile(drawn, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))
    torch.testing.assert_close(times, expected, rtol=0, atol=4e-3)
    assert times[2] == pytest.approx(2.5 * 0.5 / (1 + 1.5 * 0.5))


def test_scores_are_the_same_every_time_and_nothing_else_is_moved(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    evaluator, network, ema = evaluator_of(config, tmp_path)
    network.module.train()
    before = [p.detach().clone() for p in network.module.parameters()]
    average = [shard.tensor.clone() for shard in ema.shards()]
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    first = evaluator.evaluate(2)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(a, b) for a, b in zip(before, network.module.parameters(), strict=True))
    assert all(torch.equal(a, s.tensor) for a, s in zip(average, ema.shards(), strict=True))
    assert all(p.grad is None for p in network.module.parameters())
    assert network.module.training
    torch.manual_seed(99)
    again = evaluator.evaluate(2)
    drop = {"time_s"}
    assert {k: v for k, v in first.scores.items() if k not in drop} == {
        k: v for k, v in again.scores.items() if k not in drop
    }
    assert np.array_equal(first.pictures["samples"], again.pictures["samples"])


def test_flow_loss_is_that_of_its_definition(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    evaluator, network, _ = evaluator_of(config, tmp_path, pictures=0)

    class Zero(torch.nn.Module):
        """Predicts nothing, so that the loss is the mean square of the velocity, about 1 + mean square of latents."""

        def forward(self, img: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.zeros_like(img)

    network.module = Zero()
    scores = evaluator.evaluate(0).scores
    parts = build_frozen_parts(config, CPU, torch.float32)
    assert parts.ae is not None
    latents = torch.cat([encode_latents(parts.ae, normalize(c.video[None])) for c in clips(3, 8)])
    expected = 1 + float(latents.square().mean())
    assert scores["flow_loss_raw"] == pytest.approx(expected, abs=0.02)
    quarters = [scores[f"flow_loss_raw_q{n}"] for n in (1, 2, 3, 4)]
    assert sum(quarters) / 4 == pytest.approx(scores["flow_loss_raw"])
    assert "sample_psnr" not in scores


def test_weights_and_average_are_scored_apart(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    evaluator, network, ema = evaluator_of(config, tmp_path)
    scores = evaluator.evaluate(2).scores
    assert scores["flow_loss_ema"] != scores["flow_loss_raw"]
    with ema.swapped(network):
        assert evaluator.evaluate(2).scores["flow_loss_raw"] == scores["flow_loss_ema"]
    alone, _, _ = evaluator_of(config, tmp_path, raw_too=False)
    assert "flow_loss_raw" not in alone.evaluate(2).scores


def test_more_points_at_once_change_no_figure(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    one, _, _ = evaluator_of(config, tmp_path, batch_size=1, pictures=0)
    many, _, _ = evaluator_of(config, tmp_path, batch_size=8, pictures=0)
    assert one.evaluate(1).scores["flow_loss_raw"] == pytest.approx(many.evaluate(1).scores["flow_loss_raw"], rel=1e-6)


def test_samples_are_shown_and_written(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    evaluator, _, _ = evaluator_of(config, tmp_path)
    found = evaluator.evaluate(12)
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        "update0000012-sample0.mp4",
        "update0000012-sample1.mp4",
    ]
    info = probe(tmp_path / "eval/update0000012-sample0.mp4")
    assert (info.num_frames, info.height, info.width, info.fps) == (8, 32, 32, 8.0)
    # Two clips, two rows each, six columns, rules of 4 px between.
    assert found.pictures["samples"].shape == (4 * 32 + 3 * 4, 6 * 32 + 5 * 4, 3)
    assert 0 < found.scores["sample_psnr"] < 60
    assert set(found.scores) >= {"sample_psnr_others", "sample_matches"}


def test_a_folder_that_takes_no_files_does_not_end_the_training(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    (tmp_path / "eval").write_text("a file")
    evaluator, _, _ = evaluator_of(config, tmp_path)
    assert evaluator.evaluate(1).scores["samples_not_written"] == 2


def test_a_model_for_images_goes_on_from_the_clips_first_frame(tmp_path: Path) -> None:
    config = cache_config(tmp_path / "none.csv", **IMAGE)
    seen: list[torch.Tensor] = []
    evaluator, network, _ = evaluator_of(config, tmp_path, frames=9, pictures=1, image_to_video=True)
    network.module.register_forward_pre_hook(lambda module, args, inputs: seen.append(inputs["cond"]), with_kwargs=True)
    evaluator.evaluate(1)
    sampled = [cond for cond in seen if len(cond) == 3]
    assert len(sampled) == 2
    with_image, negative, without = sampled[0]
    # Of 4 tokens a frame, each beginning with its 4 mask values, the first frame's are given.
    assert with_image[:4, :4].eq(1).all()
    assert with_image[4:].eq(0).all()
    assert torch.equal(with_image, negative)
    assert without.eq(0).all()
    assert with_image[:4, 4:].abs().sum() > 0


def test_ranks_share_the_clips_and_call_the_model_equally_often(config: TrainDiffusionConfig, tmp_path: Path) -> None:
    whole, _, _ = evaluator_of(config, tmp_path, pictures=0)
    expected = whole.evaluate(1).scores
    sums, calls = [], []
    for rank in (0, 1):
        evaluator, network, _ = evaluator_of(config, tmp_path, pictures=0, raw_too=False)
        count: list[int] = []
        network.module.register_forward_hook(lambda *_, count=count: count.append(1))

        class Rank:
            """One of two; keeps what it would have joined."""

            device, world_size = CPU, 2

            def __init__(self, rank: int) -> None:
                self.rank = rank
                self.ranks = SimpleNamespace(data_rank=rank, data_replicas=2)

            def mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
                sums.append(values)
                return values

        evaluator._engine = Rank(rank)  # type: ignore[assignment]
        evaluator.evaluate(1)
        calls.append(len(count))
    assert calls[0] == calls[1]
    *quarters, share = (sums[0] + sums[1]).tolist()
    assert share == 3
    assert sum(quarters) / 4 / share == pytest.approx(expected["flow_loss_ema"], rel=1e-9)


def test_match_scores_tell_whose_clip_a_sample_resembles() -> None:
    videos = [(seeded_randn((3, 4, 8, 8), n) * 40 + 128).clamp(0, 255).to(torch.uint8) for n in (1, 2, 3)]
    near = [(video.float() + 5).clamp(0, 255).to(torch.uint8) for video in videos]
    good = match_scores(near[:2], videos)
    assert good["sample_matches"] == 1
    assert good["sample_psnr"] > 30 > good["sample_psnr_others"]
    crossed = match_scores([near[1], near[1]], videos)
    assert crossed["sample_matches"] == 0.5
    assert set(match_scores(near[:1], videos[:1])) == {"sample_psnr"}


def test_pixels_and_strips() -> None:
    video = torch.tensor([-2.0, -1.0, 0.0, 1.0, float("nan")]).view(1, 5, 1, 1).expand(3, 5, 2, 2)
    assert to_pixels(video)[0, :, 0, 0].tolist() == [0, 0, 128, 255, 128]
    still, clip = torch.zeros(3, 1, 4, 6, dtype=torch.uint8), torch.full((3, 3, 8, 8), 9, dtype=torch.uint8)
    picture = strip([(still, still), (clip, clip)])
    assert picture.shape == (4 + 4 + 8 + 8 + 3 * 4, 3 * 8 + 2 * 4, 3)
    assert (picture[0, :6] == 0).all()
    assert (picture[0, 6:] == 255).all()
    assert (picture[-1, :8] == 9).all()
