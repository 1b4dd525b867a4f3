"""Sampling: schedule and shift against the reference's values, Euler steps, guidance, seeded noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import load_item, seeded_randn
from support.mmdit import small_model
from torch import Tensor

from osora_cli.model.flow import shift_alpha, shift_of_tokens, shift_time
from osora_cli.model.mmdit.packing import pack, unpack
from osora_cli.model.sampling import (
    ImageCondition,
    SamplingSettings,
    TextVectors,
    euler,
    image_strengths,
    initial_noise,
    oscillating,
    sample_latents,
    timestep_schedule,
)

PLAIN = SamplingSettings(num_steps=4, guidance=1, shift=False)


def test_shift_of_tokens_is_the_references() -> None:
    meta, _ = load_item("train_math")
    for tokens, alpha in meta["get_res_lin_function_default"]:
        assert shift_of_tokens(tokens) == pytest.approx(alpha, rel=1e-12)
    for tokens, alpha in meta["get_res_lin_function(100,0.5,1000,2.5)"]:
        assert shift_of_tokens(tokens, (100, 0.5), (1000, 2.5)) == pytest.approx(alpha, rel=1e-12)


def test_alpha_of_a_latent_is_the_references_at_patch_2() -> None:
    meta, _ = load_item("train_math")
    for rows, columns, frames, _, alpha in meta["shift_alpha"]["rows"]:
        assert shift_alpha(frames, rows, columns, 2) == pytest.approx(alpha, rel=1e-12)


def test_alpha_counts_the_tokens_of_a_patch_of_1() -> None:
    # 24 x 24 latents of a DC-AE are 576 tokens: a patch of 2 would count 144.
    assert shift_alpha(1, 24, 24, 1) == pytest.approx(shift_of_tokens(576))
    assert shift_alpha(1, 24, 24, 2) == pytest.approx(shift_of_tokens(144))
    assert shift_alpha(1, 24, 24, 2) == pytest.approx(0.9416667, abs=1e-7)


def test_shifted_times_are_the_references() -> None:
    meta, tensors = load_item("train_math")
    cases = [case for case in meta["cases"] if str(case["id"]).startswith("time_shift_")]
    assert len(cases) >= 5
    for case in cases:
        got = shift_time(torch.linspace(0, 1, 41), float(case["inputs"]["alpha"]))
        torch.testing.assert_close(got, tensors[f"{case['id']}/out"], rtol=0, atol=1e-6)


def test_schedule_is_the_references() -> None:
    meta, _ = load_item("train_math")
    for steps, tokens, frames, given, times in meta["get_schedule"]:
        alpha = given or shift_of_tokens(tokens) * frames**0.5
        got = timestep_schedule(steps, alpha)
        torch.testing.assert_close(got, torch.tensor(times), rtol=0, atol=1e-6)
    assert timestep_schedule(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_schedule_needs_a_step() -> None:
    with pytest.raises(ValueError, match="`0` steps"):
        timestep_schedule(0)


def test_spec_example_of_a_shift() -> None:
    times = shift_time(torch.tensor([0.98, 0.5, 0.02]), shift_alpha(33, 24, 42, 2))
    torch.testing.assert_close(times, torch.tensor([0.9964526, 0.8514689, 0.1047382]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_a_straight_flow_is_followed_to_its_data_in_any_number_of_steps(steps: int) -> None:
    data, noise = seeded_randn((2, 5, 3), 1), seeded_randn((2, 5, 3), 2)
    got = euler(lambda x, t: noise - data, noise, timestep_schedule(steps, 3.0))
    torch.testing.assert_close(got, data, rtol=0, atol=2e-6)


def test_a_curved_flow_converges_with_the_steps() -> None:
    # dx/dt = x has the solution x(0) = x(1) / e.
    start = torch.ones(1, dtype=torch.float64)
    errors = [
        abs(float(euler(lambda x, t: x, start, timestep_schedule(n))) - float(torch.exp(-start))) for n in (8, 16, 32)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.15)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)


def test_guidance_oscillates_after_ten_steps() -> None:
    assert [oscillating(7.5, step) for step in (0, 9, 10, 11, 12, 13)] == [7.5, 7.5, 7.5, 1.0, 7.5, 1.0]


def test_image_guidance_rises_over_frames_and_falls_over_steps() -> None:
    torch.testing.assert_close(image_strengths(3.0, 0, 50, 5), torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0]))
    torch.testing.assert_close(image_strengths(3.0, 25, 50, 3), torch.tensor([1.0, 1.5, 2.0]))


def test_noise_is_the_seeds_alone() -> None:
    torch.manual_seed(1)
    first = initial_noise(5, (4, 2, 3, 3))
    state = torch.get_rng_state()
    again = initial_noise(5, (4, 2, 3, 3))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, initial_noise(6, (4, 2, 3, 3)))


class Recorder:
    """A stand-in for the model that answers by rows of its batch, so that what is combined can be told."""

    def __init__(self, answers: list[float]) -> None:
        self.answers, self.calls = answers, list[dict[str, Any]]()

    def __call__(self, **inputs: Any) -> Tensor:
        self.calls.append(inputs)
        rows = len(inputs["img"]) // len(self.answers)
        values = torch.tensor(self.answers).repeat_interleave(rows)
        return values[:, None, None].expand_as(inputs["img"]).clone()


def texts() -> tuple[TextVectors, TextVectors]:
    positive = TextVectors(torch.ones(1, 3, 6), torch.ones(1, 4))
    return positive, TextVectors(torch.zeros(1, 3, 6), torch.zeros(1, 4))


def test_without_guidance_the_model_is_called_once_a_step_with_the_text() -> None:
    model, (text, negative) = Recorder([1.0]), texts()
    noise = initial_noise(0, (4, 2, 4, 4))
    got = sample_latents(model, noise, text, negative, PLAIN, patch_size=2)
    torch.testing.assert_close(got, noise - 1.0)
    assert [len(call["img"]) for call in model.calls] == [1] * 4
    assert all(call["cond"] is None and call["guidance"] is None for call in model.calls)
    assert [float(call["timesteps"][0]) for call in model.calls] == [1.0, 0.75, 0.5, 0.25]


def test_text_guidance_takes_the_negative_text_beside_it() -> None:
    model, (text, negative) = Recorder([1.0, 0.25]), texts()
    noise = initial_noise(0, (4, 2, 4, 4)).repeat(2, 1, 1, 1, 1)
    settings = SamplingSettings(num_steps=12, guidance=3.0, shift=False)
    got = sample_latents(model, noise, text, negative, settings, patch_size=2)
    full, none = 0.25 + 3 * 0.75, 1.0
    torch.testing.assert_close(got, noise - (11 * full + none) / 12, rtol=0, atol=1e-5)
    txt = model.calls[0]["txt"]
    assert txt.shape == (4, 3, 6)
    assert txt[:2].eq(1).all()
    assert txt[2:].eq(0).all()


def test_image_guidance_combines_three_variants() -> None:
    model, (text, negative) = Recorder([1.0, 0.5, 0.25]), texts()
    noise = initial_noise(0, (4, 3, 4, 4))
    condition = ImageCondition(torch.zeros(1, 1, 3, 4, 4), torch.ones(1, 4, 3, 4, 4))
    condition.mask[:, :, 0] = 1
    settings = SamplingSettings(num_steps=1, guidance=2.0, guidance_img=3.0, scale_temporal_osci=False)
    got = sample_latents(model, noise, text, negative, settings, patch_size=2, condition=condition, cond_embed=True)
    torch.testing.assert_close(got, noise - (0.25 + 3 * 0.25 + 2 * 0.5), rtol=0, atol=1e-6)
    cond = unpack(model.calls[0]["cond"], (3, 2, 2), 2)
    assert cond.shape == (3, 5, 3, 4, 4)
    assert cond[:2, :, 0].eq(1).all()
    assert cond[:2, :, 1:].eq(0).all()
    assert cond[2].eq(0).all()
    assert model.calls[0]["txt"][1:].eq(0).all()


def test_image_guidance_is_scaled_over_frames() -> None:
    model, (text, negative) = Recorder([0.0, 1.0, 0.0]), texts()
    noise = torch.zeros(1, 4, 3, 4, 4)
    condition = ImageCondition(torch.ones(1, 1, 3, 4, 4), torch.ones(1, 4, 3, 4, 4))
    settings = SamplingSettings(num_steps=1, guidance=1.0, guidance_img=3.0, shift=False)
    got = sample_latents(model, noise, text, negative, settings, patch_size=2, condition=condition, cond_embed=True)
    # v = gi * 1 + 1 * (0 - 1), and gi is 1, 2, 3 over the frames.
    for frame, expected in enumerate((0.0, -1.0, -2.0)):
        torch.testing.assert_close(got[:, :, frame], torch.full((1, 4, 4, 4), expected))


def test_a_model_with_conditions_sees_zeros_where_none_is_given() -> None:
    model, (text, negative) = Recorder([1.0, 1.0]), texts()
    settings = SamplingSettings(num_steps=1, guidance=2.0)
    sample_latents(model, initial_noise(0, (4, 1, 2, 2)), text, negative, settings, patch_size=2, cond_embed=True)
    assert model.calls[0]["cond"].shape == (2, 1, 20)
    assert model.calls[0]["cond"].eq(0).all()


def test_a_condition_without_a_model_for_it_is_refused() -> None:
    text, negative = texts()
    condition = ImageCondition(torch.ones(1, 1, 1, 2, 2), torch.ones(1, 4, 1, 2, 2))
    with pytest.raises(ValueError, match="no cond_embed"):
        sample_latents(
            Recorder([1.0]), torch.zeros(1, 4, 1, 2, 2), text, negative, PLAIN, patch_size=2, condition=condition
        )


def test_with_a_real_model_a_step_is_its_velocity() -> None:
    model = small_model(cond_embed=True)
    text = TextVectors(seeded_randn((1, 7, 12), 3), seeded_randn((1, 10), 4))
    noise = initial_noise(2, (4, 2, 4, 6)).repeat(2, 1, 1, 1, 1)
    settings = SamplingSettings(num_steps=1, guidance=1)
    got = sample_latents(model, noise, text, text, settings, patch_size=2, cond_embed=True)
    with torch.no_grad():
        from osora_cli.model.mmdit.packing import make_tokens

        tokens = make_tokens(noise, text.tokens, text.pooled, 2)
        v = model(
            img=tokens.img, img_ids=tokens.img_ids, txt=tokens.txt, txt_ids=tokens.txt_ids, y_vec=tokens.y_vec,
            timesteps=torch.ones(2), cond=torch.zeros(2, 12, 20),
        )  # fmt: skip
    torch.testing.assert_close(pack(got, 2), tokens.img - v, rtol=0, atol=1e-6)
    # Not bit-equal: how a matrix product is cut up may differ between the rows of a batch.
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=1e-6)
    guided = sample_latents(
        model, noise, text, text, SamplingSettings(num_steps=1, guidance=5.0), patch_size=2, cond_embed=True
    )
    # Text and negative text are the same here, so guidance changes nothing.
    torch.testing.assert_close(guided, got, rtol=0, atol=1e-5)
