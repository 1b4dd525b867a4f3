"""Visual conditions: the golden ones, and masks and latents at the right frames for any clip."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.golden import assert_close, cases_of, load_item, make_input
from support.golden_clips import StubAutoencoder
from torch import Tensor

from osora_cli.trainer.conditions import (
    KINDS,
    CachedParts,
    LatentRules,
    PixelParts,
    draw_kinds,
    encoded_parts,
    make_condition,
    parts_of,
    possible_kinds,
)

ITEM = "train_math"
ALL = [case for case in cases_of(ITEM) if "condition_config" in case.values[0] and "fn" in case.values[0]]
# `pad` is an option that the reference's script never sets, and osora does not have.
GOLDEN = [case for case in ALL if not case.values[0]["kw"]]


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_conditions(case: dict[str, Any]) -> None:
    meta, _ = load_item(ITEM)
    ae = StubAutoencoder(case["stub_ae"])
    rules = LatentRules(ae.time_ratio, not case["fn"].endswith("uncausal"))
    video = make_input(case["inputs"]["x"])
    encoded: list[tuple[int, ...]] = []

    def encode(pieces: Tensor) -> Tensor:
        encoded.append(tuple(pieces.shape))
        return ae.encode(pieces)

    z = ae.encode(video)
    config = dict(case["condition_config"])
    seed = case["inputs"]["x"]["seed"]
    kinds = draw_kinds(config, len(video), z.shape[2], rules, random.Random(seed))
    cond = make_condition(kinds, z, PixelParts(video, encode), rules)
    assert cond[:, 0, :, 0, 0].tolist() == case["mask_per_frame"]
    assert_close(meta, case["outputs"]["x_0"], z)
    assert_close(meta, case["outputs"]["cond"], cond)
    assert config == case["condition_config"], "a short clip changes nothing for those after it"
    # The same pieces as the reference encodes, all of one length at once.
    pieces = [shape[2] for shape in case["encode_calls"] if shape[2] < video.shape[2]]
    assert sum(shape[0] for shape in encoded) == len(pieces)
    assert len(encoded) == len(set(pieces))


@pytest.mark.parametrize("case", [c for c in cases_of(ITEM) if "error" in c.values[0] and "condition" in str(c.values)])
def test_where_the_reference_fails_the_clip_is_trained_on_text_alone(case: dict[str, Any]) -> None:
    causal = not case["id"].startswith("uncausal")
    rules = LatentRules(4, causal)
    frames = rules.frames(case["shape"][2])
    assert draw_kinds(case["condition_config"], 2, frames, rules, random.Random(0)) == ["t2v", "t2v"]


def clip_of(frames: int, ratio: int, causal: bool) -> tuple[Tensor, LatentRules]:
    length = (frames - 1) * ratio + 1 if causal else frames * ratio
    video = torch.randn(2, 3, length, 8, 8, generator=torch.Generator().manual_seed(frames))
    return video, LatentRules(ratio, causal)


@settings(deadline=None, max_examples=80)
@given(
    frames=st.integers(1, 40),
    ratio=st.sampled_from([4, 8]),
    causal=st.booleans(),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
@example(frames=2, ratio=4, causal=False, kind="i2v_loop", seed=0)  # its two latent frames would both be shown
def test_what_is_shown_is_what_its_frames_encode_to(
    frames: int, ratio: int, causal: bool, kind: str, seed: int
) -> None:
    video, rules = clip_of(frames, ratio, causal)
    ae = StubAutoencoder({"time_ratio": ratio, "spatial": 8, "latent_channels": 2})
    z = ae.encode(video)
    weights = {kind: 1.0}
    kinds = draw_kinds(weights, 2, z.shape[2], rules, random.Random(seed))
    assert weights == {kind: 1.0}
    assert set(kinds) <= {kind, "t2v"}
    cond = make_condition(kinds, z, PixelParts(video, ae.encode), rules)
    mask, latent = cond[:, :1], cond[:, 1:]
    assert cond.shape == (2, 3, *z.shape[2:])
    assert bool(((mask == 0) | (mask == 1)).all())
    assert bool((latent * (1 - mask) == 0).all()), "nothing is shown outside the mask"
    assert bool((mask == 0).any()), "something is left to make"
    if kinds[0] == "t2v":
        assert not bool(mask.any())
        return
    shown = mask[0, 0, :, 0, 0].bool()
    for side, count in parts_of(kind, rules):
        piece = video[:, :, :count] if side == "head" else video[:, :, video.shape[2] - count :]
        length = rules.frames(count)
        place = slice(0, length) if side == "head" else slice(z.shape[2] - length, None)
        assert bool(shown[place].all())
        want = z[:, :, place] if count > 1 and not causal else ae.encode(piece)
        assert torch.equal(latent[:, :, place], want)


@pytest.mark.parametrize("causal", [True, False])
def test_a_cache_gives_the_same_condition_as_pixels(causal: bool) -> None:
    video, rules = clip_of(24, 4, causal)
    ae = StubAutoencoder({"time_ratio": 4, "spatial": 8, "latent_channels": 2})
    z = ae.encode(video)
    weights = dict.fromkeys(KINDS, 1.0)
    wanted = encoded_parts(weights, rules)
    sizes = {("head", 1), ("tail", 1)}
    if causal:
        sizes |= {("head", 33), ("tail", 33), ("head", 65), ("tail", 65)}
    assert set(wanted) == sizes
    cached = CachedParts(
        {part: ae.encode(video[:, :, : part[1]] if part[0] == "head" else video[:, :, -part[1] :]) for part in wanted}
    )
    for kind in possible_kinds(weights, z.shape[2], rules):
        kinds = [kind, "t2v"]
        a = make_condition(kinds, z, PixelParts(video, ae.encode), rules)
        assert torch.equal(a, make_condition(kinds, z, cached, rules))


def test_kinds_are_drawn_by_weight() -> None:
    rules = LatentRules(4, True)
    kinds = draw_kinds({"t2v": 1, "i2v_head": 3, "i2v_tail": 0}, 4000, 9, rules, random.Random(1))
    assert set(kinds) == {"t2v", "i2v_head"}
    assert kinds.count("i2v_head") / 4000 == pytest.approx(0.75, abs=0.03)


def test_which_kinds_a_clip_is_long_enough_for() -> None:
    weights = dict.fromkeys(KINDS, 1.0)
    images = ["t2v", "i2v_head", "i2v_tail", "i2v_loop"]
    for causal in (True, False):
        rules = LatentRules(4, causal)
        short, long = 8 + causal, 16 + causal
        assert list(possible_kinds(weights, 1, rules)) == ["t2v"]
        assert list(possible_kinds(weights, short, rules)) == images
        assert list(possible_kinds(weights, short + 1, rules)) == [*images, "v2v_head", "v2v_tail"]
        assert list(possible_kinds(weights, long, rules)) == [*images, "v2v_head", "v2v_tail"]
        assert list(possible_kinds(weights, long + 1, rules)) == list(KINDS)
