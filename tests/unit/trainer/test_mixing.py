"""Stills and shorter clips among clips."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from support.golden import load_json

from osora_cli.trainer.mixing import Mixing, modulated_ratio
from osora_cli.trainer.task import StepContext


def context(update: int, rank: int = 0, world_size: int = 1) -> StepContext:
    return StepContext(seed=7, update=update, micro=0, accumulation=1, rank=rank, world_size=world_size)


def mixing(strategy: str | None, ratio: float = 0.2, rule: str = "balanced") -> Mixing:
    return Mixing(strategy, ratio, rule, lambda most: [n for n in (1, 8, 16, 24, 32) if n <= most])


VIDEO = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4, 1, 1)


def test_modulated_ratio_golden() -> None:
    table = load_json("train_math")["modulated_mixed_image_ratio"]
    for ranks, ratio, modulated in table["rows"]:
        assert modulated_ratio(ratio, ranks) == pytest.approx(modulated, rel=1e-12)


def test_golden_decisions_of_open_soras_rule() -> None:
    """The rule against the seed's own decisions, with the seed's generator in the place of ours."""

    class Theirs(StepContext):
        def rng(self, purpose: str) -> random.Random:
            return generator

    rows = [
        r for r in load_json("train_math")["mixed_strategy_decisions"]["rows"] if r["strategy"] != "mixed_video_random"
    ]
    for row in rows:
        ranks, rank = row["num_ranks"], row["rank"]
        generator = random.Random(1024 + rank)
        rule = Mixing(row["strategy"], row["ratio"], "open_sora", lambda most: list(range(1, most + 1)))
        video = torch.zeros(1, 3, 32, 1, 1)
        got = [rule.apply(video, Theirs(1024, n, 0, 1, rank, ranks)).shape[2] for n in range(len(row["seq"]))]
        assert got == [frames for frames, _ in row["seq"]], (ranks, rank)
    assert {(r["num_ranks"], r["rank"] > 0) for r in rows} >= {(4, True), (4, False), (8, True), (1, False)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_balanced_stills_come_on_every_rank_and_cost_a_clip(world_size: int) -> None:
    rule = mixing("mixed_video_image", 0.25)
    for rank in range(world_size):
        shapes = Counter(tuple(rule.apply(VIDEO, context(n, rank, world_size)).shape) for n in range(2000))
        assert set(shapes) == {(2, 3, 4, 1, 1), (8, 3, 1, 1, 1)}
        assert shapes[8, 3, 1, 1, 1] / 2000 == pytest.approx(0.25, abs=0.03)


def test_balanced_stills_are_the_frames_of_the_clips() -> None:
    stills = mixing("mixed_video_image", 1.0).apply(VIDEO, context(0))
    for clip in range(2):
        for frame in range(4):
            assert torch.equal(stills[4 * clip + frame, :, 0], VIDEO[clip, :, frame])


def test_open_soras_rule_leaves_the_first_rank_out_and_keeps_the_share() -> None:
    rule = mixing("mixed_video_image", 0.2, "open_sora")
    counts = [sum(rule.apply(VIDEO, context(n, r, 4)).shape[2] == 1 for n in range(2000)) for r in range(4)]
    assert counts[0] == 0
    assert sum(counts) / 8000 == pytest.approx(0.2, abs=0.02)
    assert rule.apply(VIDEO, context(0, 0, 1)).shape == VIDEO.shape
    assert "clips only" in rule.notes(1)[0]
    assert rule.notes(4) == mixing("mixed_video_image").notes(1) == []


def test_shorter_clips_have_lengths_that_the_net_takes_the_same_on_all_ranks() -> None:
    video = torch.zeros(1, 3, 32, 1, 1)
    balanced, seeds = mixing("mixed_video_random"), mixing("mixed_video_random", rule="open_sora")
    lengths = [[balanced.apply(video, context(n, r, 3)).shape[2] for r in range(3)] for n in range(200)]
    assert {n for row in lengths for n in row} == {1, 8, 16, 24, 32}
    assert all(len(set(row)) == 1 for row in lengths)
    own = [[seeds.apply(video, context(n, r, 3)).shape[2] for r in range(3)] for n in range(200)]
    assert any(len(set(row)) > 1 for row in own)


def test_without_a_strategy_and_for_stills_nothing_is_drawn() -> None:
    still = VIDEO[:, :, :1]
    assert mixing(None).apply(VIDEO, context(0)) is VIDEO
    assert mixing("mixed_video_image", 1.0).apply(still, context(0)) is still
