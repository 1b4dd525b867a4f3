"""Rectified flow: golden steps, and what follows from its definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.golden import assert_close, cases_of, load_item, load_json, make_input, seeded_randn
from support.golden_clips import StubAutoencoder
from torch import Tensor

from osora_cli.model.flow import shift_of_tokens
from osora_cli.model.mmdit.packing import pack, pack_condition, unpack
from osora_cli.model.text import extend_tokens, padded_length
from osora_cli.trainer.conditions import LatentRules, PixelParts, draw_kinds, make_condition
from osora_cli.trainer.diffusion import dropped
from osora_cli.trainer.flow import interpolate, kept_frames, sample_losses, training_times, velocity

ITEM = "train_math"
PREPARED = [case for case in cases_of(ITEM) if "x_1" in case.values[0].get("outputs", {})]


def texts_of(case: dict[str, Any], batch: int, length: int) -> tuple[Tensor, Tensor]:
    inputs = case["inputs"]
    if inputs.get("cached"):
        return seeded_randn((batch, 6, 8), inputs["cached"]["text_t5"]), seeded_randn(
            (batch, 5), inputs["cached"]["text_clip"]
        )
    return seeded_randn((batch, length, 8), inputs["t5"]["seed"]), seeded_randn((batch, 5), inputs["clip"]["seed"])


@pytest.mark.parametrize("case", PREPARED)
def test_a_training_step_is_the_references_step(case: dict[str, Any]) -> None:
    """The reference's draws, in its order, through our functions: condition, time, dropout, noise, loss."""
    meta, _ = load_item(ITEM)
    config, inputs, outputs = case["config"], case["inputs"], case["outputs"]
    patch, dtype = config["patch_size"], getattr(torch, case["dtype_run"].removeprefix("torch."))
    ae = StubAutoencoder(case["stub_ae"])
    cached = inputs.get("cached")
    video = make_input(inputs["video"]).to(dtype)
    z = make_input(cached["video_latents"]) if cached else ae.encode(video)
    batch, _, frames, rows, columns = z.shape
    rng = random.Random(inputs["seed"] + 8)
    generator = torch.Generator().manual_seed(inputs["seed"] + 8)

    if "cond" in outputs:
        rules = LatentRules(ae.time_ratio, bool(config["is_causal_vae"]))
        kinds = draw_kinds(config["condition_config"], batch, frames, rules, rng)
        cond = make_condition(kinds, z, PixelParts(video, ae.encode), rules)
        assert_close(meta, outputs["cond"], pack_condition(cond[:, :1], cond[:, 1:], patch))

    # The reference divides by 4 whatever the patch is; the product takes the true patch (model/flow.py).
    alpha = shift_of_tokens(rows * columns // 4) * frames**0.5
    t = training_times(torch.randn(batch, generator=generator), alpha).to(dtype)
    assert_close(meta, outputs["timesteps"], t)

    length = padded_length(6, frames * rows * columns // patch**2, config.get("_seq_align", 1))
    t5, clip = texts_of(case, batch, length)
    shares = config.get("dropout_ratio")
    if shares:
        null_t5 = extend_tokens(make_input(inputs["null_txt"]), length).to(dtype)
        null_clip = make_input(inputs["null_vec"]).to(dtype)
        t5 = dropped(t5.to(dtype), null_t5, torch.rand(batch, generator=generator), shares["t5"])
        clip = dropped(clip.to(dtype), null_clip, torch.rand(batch, generator=generator), shares["clip"])
    assert_close(meta, outputs["txt"], t5)
    assert_close(meta, outputs["y_vec"], clip)

    x_0, sigma_min = pack(z, patch), config.get("sigma_min", 1e-5)
    # Strides as those of the tokens, which with a patch of 1 are a view: what normal_ draws hangs on them.
    x_1 = torch.empty_like(x_0, dtype=torch.float32).normal_(generator=generator).to(dtype)
    assert_close(meta, outputs["x_1"], x_1)
    assert_close(meta, outputs["img"], interpolate(x_0, x_1, t, sigma_min))
    assert_close(meta, outputs["v_t"], velocity(x_0, x_1, sigma_min))
    predicted = make_input(inputs["pred"])
    grid = (frames, rows // patch, columns // patch)
    target = velocity(x_0, x_1, sigma_min)
    loss = sample_losses(unpack(predicted.to(dtype), grid, patch), unpack(target, grid, patch)).mean()
    assert_close(meta, outputs["loss"], loss.view(1))


@pytest.mark.parametrize("case", [c for c in cases_of(ITEM) if c.values[0]["id"].startswith("batch_loss_")])
def test_the_loss_leaves_out_what_an_image_condition_shows(case: dict[str, Any]) -> None:
    meta, _ = load_item(ITEM)
    kinds = {"head": [0], "tail": [-1], "loop": [0, -1], "head2": [0, 1], "all": [0, 1, 2, 3, 4], "none": []}
    name = case["id"].removeprefix("batch_loss_")
    shown = torch.zeros(4, 5)
    samples = ["head", "tail", "loop", "none"] if name == "mixed" else [name] * 4
    for index, kind in enumerate(samples):
        shown[index, kinds.get(kind, [])] = 1
    predicted, target = (unpack(seeded_randn((4, 30, 12), seed), (5, 2, 3), 2) for seed in (41600, 41601))
    loss = sample_losses(predicted, target, None if name == "nomask" else kept_frames(shown)).mean()
    assert_close(meta, case["outputs"]["loss"], loss.view(1))


def test_no_gradient_comes_from_frames_that_are_given() -> None:
    shown = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.float32)
    predicted = seeded_randn((4, 3, 4, 2, 2), 1).requires_grad_()
    sample_losses(predicted, seeded_randn((4, 3, 4, 2, 2), 2), kept_frames(shown)).mean().backward()
    assert predicted.grad is not None
    per_frame = predicted.grad.abs().sum(dim=(1, 3, 4))
    assert torch.equal(per_frame == 0, shown == 1)


def test_clips_of_two_frames_keep_something_to_learn() -> None:
    shown = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert kept_frames(shown).tolist() == [[0, 1], [1, 1], [1, 0]]
    assert kept_frames(torch.zeros(2, 1)).tolist() == [[1], [1]]


def test_ends_of_the_way_and_its_derivative() -> None:
    data, noise = seeded_randn((2, 3, 2, 2, 2), 1).double(), seeded_randn((2, 3, 2, 2, 2), 2).double()
    for sigma_min in (0.0, 0.1):
        at = [interpolate(data, noise, torch.full((2,), t, dtype=torch.float64), sigma_min) for t in (0.0, 0.3, 1.0)]
        assert torch.allclose(at[0], data + sigma_min * noise)
        assert torch.allclose(at[2], noise)
        assert torch.allclose((at[2] - at[1]) / 0.7, velocity(data, noise, sigma_min))


def test_times_lean_to_noise_the_more_the_longer_the_clip() -> None:
    normal = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    means = [float(training_times(normal, alpha).mean()) for alpha in (1.0, 2.0, 6.0)]
    assert means[0] == pytest.approx(0.5, abs=0.01)
    assert means[0] < means[1] < means[2] < 1


def test_dropout_takes_each_sample_by_its_own_draw() -> None:
    for case in (c for c in load_json(ITEM)["cases"] if c["id"].startswith("dropout_")):
        meta, _ = load_item(ITEM)
        uniform = torch.rand(8, generator=torch.Generator().manual_seed(41200))
        value, null = seeded_randn((8, 3, 4), 41201), seeded_randn((1, 3, 4), 41202)
        assert_close(meta, case["outputs"]["out"], dropped(value, null, uniform, float(case["id"].split("_")[1])))
