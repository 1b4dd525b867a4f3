"""The losses against golden values, their stated properties, and the adaptive weight against its two-pass form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.golden import assert_close, cases_of, load_item, load_json, make_input, rule_tensor, seeded_randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.hunyuan_vae.posterior import DiagonalGaussian
from osora_cli.model.losses import (
    LastConvRecorder,
    adaptive_weight,
    discriminator_loss,
    generator_loss,
    loss_factor,
    vae_gan_loss,
    vae_loss,
)

ITEM, _ = load_item("vae_losses")
UNUSED = "not used"  # helpers of the seed that its training never calls say so in their note


def mean_square(target_NCHW: Tensor, recon_NCHW: Tensor) -> Tensor:
    """The perceptual stand-in of the golden cases."""
    return ((target_NCHW - recon_NCHW) ** 2).mean(dim=(1, 2, 3), keepdim=True)


class Toy(nn.Module):
    """The golden cases' decoder (two convolutions) and discriminator (one)."""

    def __init__(self, keys: dict[str, list[int]]) -> None:
        super().__init__()

        def conv(name: str) -> nn.Conv3d:
            out_channels, in_channels, kernel = keys[f"{name}.weight"][:3]
            return nn.Conv3d(in_channels, out_channels, kernel, padding=kernel // 2)

        self.dec1, self.dec2, self.d = conv("dec1"), conv("dec2"), conv("d")
        with torch.no_grad():
            for key, value in self.state_dict().items():
                value.copy_(rule_tensor(key, value.shape))

    def decode(self, z_BCTHW: Tensor) -> Tensor:
        return self.dec2(torch.tanh(self.dec1(z_BCTHW)))


def full_case() -> dict[str, Any]:
    """The first case that states the toy's keys and inputs: later ones say `as` it."""
    return next(c for c in ITEM["cases"] if isinstance(c.get("inputs"), dict) and "z" in c["inputs"])


def toy_setup() -> tuple[Toy, Tensor, Tensor]:
    case = full_case()
    return Toy(case["keys"]), make_input(case["inputs"]["video"]), make_input(case["inputs"]["z"])


def posterior_of(text: str) -> DiagonalGaussian:
    """`...(rnd(S+62=31062, [2,8,2,3,2]))` as the posterior with these moments."""
    found = re.search(r"rnd\((?:.*?=)?(\d+), \[([\d, ]+)\]\)", text)
    assert found, text
    return DiagonalGaussian.from_moments(seeded_randn([int(n) for n in found[2].split(",")], int(found[1])))


def vae_cases() -> list[Any]:
    return [p for p in cases_of("vae_losses") if isinstance(p.values[0].get("kwargs"), dict)]


@pytest.mark.parametrize("case", vae_cases())
def test_vae_loss_golden(case: dict[str, Any]) -> None:
    toy, inputs = Toy(case["keys"]), case["inputs"]
    # Whether a case passes its posterior shows in its own KL.
    kl_loss = case["outputs"]["kl_loss"]["absmax"]
    weights = case["kwargs"]
    posterior = posterior_of(inputs["posterior"])
    passes_posterior = kl_loss > 0 or (weights["kl_loss_weight"] == 0)
    loss = vae_loss(
        make_input(inputs["video"]),
        toy.decode(make_input(inputs["z"])),
        perceptual=mean_square,
        perceptual_weight=weights["perceptual_loss_weight"],
        kl_weight=weights["kl_loss_weight"],
        posterior=posterior if passes_posterior else None,
        logvar=weights["logvar_init"],
    )
    got = {"nll_loss": loss.nll, "kl_loss": loss.kl, "recon_loss": loss.rec, "perceptual_loss": loss.perceptual}
    assert set(case["outputs"]) == set(got)
    for name, output in case["outputs"].items():
        assert_close(ITEM, output, got[name].reshape(1))


def test_discriminator_losses_golden() -> None:
    case = next(c for c in ITEM["cases"] if {"hinge", "vanilla"} <= set(c["outputs"]))
    real, fake = (case["inputs"][name]["scale"] * make_input(case["inputs"][name]) for name in ("real", "fake"))
    for name, output in case["outputs"].items():
        kind = "wgan-gp" if name == "wgan" else name
        assert_close(ITEM, output, discriminator_loss(real, fake, kind).reshape(1))


def test_discriminator_loss_table() -> None:
    case = next(c for c in ITEM["cases"] if {"hinge", "vanilla"} <= set(c["outputs"]))
    real, fake = (case["inputs"][name]["scale"] * make_input(case["inputs"][name]) for name in ("real", "fake"))
    table = ITEM["discriminator_loss_table"]
    for row in table["rows"]:
        entry = dict(zip(table["columns"], row, strict=True))
        loss = discriminator_loss(real, fake, entry["disc_loss_type"])
        factor = loss_factor(entry["global_step"], entry["disc_start"], entry["disc_factor"])
        assert float(loss * factor) == pytest.approx(entry["value"], abs=1e-6, rel=2e-3), entry


def gan_loss(toy: Toy, video: Tensor, z: Tensor, **kwargs: Any) -> Any:
    recorder = LastConvRecorder.of(toy, toy.dec2.weight)
    with recorder:
        recon = toy.decode(z)
    options = {"perceptual": mean_square, "perceptual_weight": 0.5, "kl_weight": 0.0, "update": 1, **kwargs}
    return vae_gan_loss(video, recon, recorder, toy.d, **options)


def test_generator_loss_table(note_repaired: Callable[[str, str], None]) -> None:
    toy, video, z = toy_setup()
    table = ITEM["generator_loss_table"]
    repaired = 0
    for row in table["rows"]:
        entry = dict(zip(table["columns"], row, strict=True))
        loss = gan_loss(
            toy, video, z, update=entry["global_step"], gen_start=entry["gen_start"],
            disc_factor=entry["disc_factor"], disc_weight=entry["disc_weight"],
        )  # fmt: skip
        weighted = float(loss.weight * loss.factor * loss.generator)
        if isinstance(entry["weighted_gen_loss"], str):  # the reference stops here with a TypeError
            repaired += 1
            note_repaired("vae_losses: generator_loss_table, rows that end in a TypeError", "disc_factor null is off")
            assert weighted == 0
            loss.objective.backward()
            continue
        assert weighted == pytest.approx(entry["weighted_gen_loss"], abs=1e-6, rel=2e-3), entry
        assert float(loss.generator) == pytest.approx(entry["g_loss"], abs=1e-6, rel=2e-3), entry
    assert repaired == sum(row[1] is None for row in table["rows"])


def test_adaptive_weight_golden() -> None:
    case = next(c for c in ITEM["cases"] if "adaptive_weight" in c["outputs"])
    toy, video, z = toy_setup()
    recorder = LastConvRecorder.of(toy, toy.dec2.weight)
    with recorder:
        recon = toy.decode(z)
    leaf = recon.detach().requires_grad_(True)
    nll = vae_loss(video, leaf, perceptual=mean_square, perceptual_weight=0.5, kl_weight=0.0).nll
    (a,) = torch.autograd.grad(nll, leaf)
    (b,) = torch.autograd.grad(generator_loss(toy.d(leaf)), leaf)
    nll_grad, g_grad = recorder.weight_gradients(a, b)
    disc_weight = float(re.search(r"disc_weight ([\d.]+)", case["kwargs"])[1])  # type: ignore[index]
    got = {
        "adaptive_weight": adaptive_weight(nll_grad.norm(), g_grad.norm(), disc_weight).reshape(1),
        "nll": nll.reshape(1),
        "nll_grad_norm": nll_grad.norm().reshape(1),
        "g_grad_norm": g_grad.norm().reshape(1),
        "nll_grad": nll_grad,
        "g_grad": g_grad,
    }
    assert set(case["outputs"]) == set(got)
    for name, output in case["outputs"].items():
        assert_close(ITEM, output, got[name])


def test_whole_step_gradients_golden() -> None:
    case = next(c for c in ITEM["cases"] if "loss" in c["outputs"] and "dec1.weight" in c["outputs"])
    toy, video, z = toy_setup()
    disc_weight = float(re.search(r"disc_weight ([\d.]+)", case["inputs"])[1])  # type: ignore[index]
    loss = gan_loss(toy, video, z, disc_weight=disc_weight)
    loss.objective.backward()
    parameters = dict(toy.named_parameters())
    for name, output in case["outputs"].items():
        value = loss.objective.reshape(1) if name == "loss" else parameters[name].grad
        assert value is not None
        assert_close(ITEM, output, value)
    assert toy.d.weight.grad is None  # the generator's pass leaves the discriminator alone


def test_every_golden_case_has_a_test() -> None:
    known = {"nll_loss", "hinge", "adaptive_weight", "dec1.weight"}
    for case in ITEM["cases"]:
        assert known & set(case["outputs"]) or UNUSED in case.get("note", ""), case["id"]
    assert load_json("vae_losses")["generator_loss_table"]["rows"]


class TwoPass:
    """The seed's form: two backward passes to the last weight, then one through everything."""

    def __init__(self, model: nn.Module, last: Tensor, d: Callable[[Tensor], Tensor]) -> None:
        self.model, self.last, self.d = model, last, d

    def gradients(self, video: Tensor, recon: Tensor, disc_weight: float) -> tuple[Tensor, list[Tensor]]:
        nll = vae_loss(video, recon, perceptual=mean_square, perceptual_weight=0.5, kl_weight=0.0).nll
        g = -self.d(recon).mean()
        (nll_grad,) = torch.autograd.grad(nll, self.last, retain_graph=True)
        (g_grad,) = torch.autograd.grad(g, self.last, retain_graph=True)
        weight = adaptive_weight(nll_grad.norm(), g_grad.norm(), disc_weight)
        return weight, list(torch.autograd.grad(nll + weight * g, list(self.model.parameters())))


class Decoder(nn.Module):
    """A stand-in with a tail like the autoencoders': norm, activation, convolution; odd sizes, two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, 16, 3, padding=1))
        self.tail = nn.Sequential(nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv3d(16, 3, 3, padding=1))
        self.checkpointed = False

    def forward(self, z: Tensor) -> Tensor:
        if self.checkpointed:
            hidden = checkpoint(self.body, z, use_reentrant=False)
            return checkpoint(self.tail, hidden, use_reentrant=False)
        return self.tail(self.body(z))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_cheap_adaptive_weight_equals_the_two_pass_form(checkpointed: bool) -> None:
    torch.manual_seed(5)
    decoder, d = Decoder(), nn.Conv3d(3, 1, 3, stride=2)
    z, video = torch.randn(2, 4, 5, 9, 7), torch.randn(2, 3, 5, 9, 7).clamp(-1, 1)
    last = decoder.tail[2].weight
    want_weight, want = TwoPass(decoder, last, d).gradients(video, decoder(z), 0.05)

    decoder.checkpointed = checkpointed
    recorder = LastConvRecorder.of(decoder, last)
    with recorder:
        recon = decoder(z)
    loss = vae_gan_loss(
        video, recon, recorder, d, update=0, perceptual=mean_square, perceptual_weight=0.5, kl_weight=0.0,
        disc_weight=0.05,
    )  # fmt: skip
    loss.objective.backward()
    assert float(loss.weight) == pytest.approx(float(want_weight), rel=1e-6)
    for got, expected in zip(decoder.parameters(), want, strict=True):
        assert got.grad is not None
        assert float((got.grad - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_cheap_adaptive_weight_on_a_small_dc_ae(checkpointed: bool) -> None:
    config = next(c["config"] for c in load_json("dcae_tiny")["cases"] if "config" in c)
    model = build_model({"type": "dc_ae", **config}, seed=1)
    assert isinstance(model, DcAe)
    d = nn.Conv3d(3, 1, 3, stride=2)
    video = seeded_randn((1, 3, 8, 64, 32), 2).clamp(-1, 1)
    want_weight, want = TwoPass(model, model.get_last_layer(), d).gradients(video, model(video)[0], 0.05)
    model.enable_grad_checkpoint(checkpointed)
    recorder = LastConvRecorder.of(model, model.get_last_layer())
    with recorder:
        recon = model(video)[0]
    loss = vae_gan_loss(
        video, recon, recorder, d, update=0, perceptual=mean_square, perceptual_weight=0.5, kl_weight=0.0,
        disc_weight=0.05,
    )  # fmt: skip
    loss.objective.backward()
    assert float(loss.weight) == pytest.approx(float(want_weight), rel=1e-6)
    largest = max(float(g.abs().max()) for g in want)
    for got, expected in zip(model.parameters(), want, strict=True):
        assert got.grad is not None
        assert float((got.grad - expected).abs().max()) <= 1e-6 * largest


def test_objective_is_the_loss_and_scales_with_accumulation() -> None:
    toy, video, z = toy_setup()
    loss = gan_loss(toy, video, z, disc_weight=0.05)
    value = float(loss.vae.total + loss.weight * loss.factor * loss.generator)
    assert float(loss.objective.detach()) == pytest.approx(value, rel=1e-6)
    loss.objective.backward()
    whole = toy.dec1.weight.grad
    assert whole is not None
    toy.dec1.weight.grad = None
    (gan_loss(toy, video, z, disc_weight=0.05).objective / 4).backward()
    assert toy.dec1.weight.grad is not None
    torch.testing.assert_close(toy.dec1.weight.grad * 4, whole)


def test_kl_gradient_reaches_the_posterior() -> None:
    toy, video, z = toy_setup()
    moments = torch.randn(2, 8, 2, 3, 2).requires_grad_(True)
    loss = gan_loss(toy, video, z, kl_weight=0.1, posterior=DiagonalGaussian.from_moments(moments))
    loss.objective.backward()
    (want,) = torch.autograd.grad(0.1 * DiagonalGaussian.from_moments(moments).kl().mean(), moments)
    assert moments.grad is not None
    torch.testing.assert_close(moments.grad, want)


@pytest.mark.parametrize("disc_factor", [None, 0.0])
def test_a_discriminator_switched_off_leaves_the_plain_loss(disc_factor: float | None) -> None:
    toy, video, z = toy_setup()
    gan_loss(toy, video, z, disc_factor=disc_factor).objective.backward()
    got = toy.dec1.weight.grad
    toy.dec1.weight.grad = None
    vae_loss(video, toy.decode(z), perceptual=mean_square, perceptual_weight=0.5, kl_weight=0.0).total.backward()
    assert got is not None
    assert toy.dec1.weight.grad is not None
    torch.testing.assert_close(got, toy.dec1.weight.grad)
    # and the discriminator's own loss is a tensor that can be passed backward (the reference has the integer 0)
    own = discriminator_loss(toy.d(video), toy.d(video.flip(0))) * loss_factor(100, 0, disc_factor)
    own.backward()
    assert toy.d.weight.grad is not None
    assert not toy.d.weight.grad.any()


def test_spec_check_vector() -> None:
    video = torch.linspace(-1, 1, 2 * 3 * 4 * 8 * 8).reshape(2, 3, 4, 8, 8)

    def quarter(target: Tensor, _: Tensor) -> Tensor:
        return torch.full((len(target), 1, 1, 1), 0.25)

    loss = vae_loss(video, 0.9 * video + 0.05, perceptual=quarter, perceptual_weight=0.5, kl_weight=0.0)
    assert float(loss.nll) == pytest.approx(36.004692, rel=1e-6)
    assert float(loss.rec) == pytest.approx(12.004693, rel=1e-6)
    assert float(loss.perceptual) == pytest.approx(48.0)
    assert float(loss.rec_per_pixel) == pytest.approx(float((0.1 * video - 0.05).abs().mean()), rel=1e-6)
    assert float(loss.perceptual_mean) == pytest.approx(0.25)


def test_losses_are_fp32_for_bf16_tensors() -> None:
    torch.manual_seed(1)
    video = torch.rand(1, 3, 4, 64, 64) * 2 - 1
    recon = (video + 0.1 * torch.randn_like(video)).bfloat16().requires_grad_(True)
    loss = vae_loss(video.bfloat16(), recon, perceptual_weight=0.0, kl_weight=0.0)
    want = (video.bfloat16().double() - recon.detach().double()).abs().sum() / 4
    assert loss.total.dtype == torch.float32
    assert float(loss.rec) == pytest.approx(float(want), rel=1e-6)
    loss.total.backward()
    assert recon.grad is not None
    assert recon.grad.dtype == torch.bfloat16


def test_logvar_is_a_constant_of_the_likelihood() -> None:
    video, recon = torch.zeros(1, 3, 1, 2, 2), torch.ones(1, 3, 1, 2, 2)
    loss = vae_loss(video, recon, perceptual_weight=0.0, kl_weight=0.0, logvar=0.4)
    assert float(loss.nll) == pytest.approx(12 / math.exp(0.4) + 12 * 0.4)


def test_wrong_use_is_refused() -> None:
    video = torch.zeros(1, 3, 4, 4, 4)
    with pytest.raises(ValueError, match="the reconstruction is"):  # would broadcast over time
        vae_loss(video, video[:, :, :1], perceptual_weight=0.0, kl_weight=0.0)
    with pytest.raises(ValueError, match="needs a perceptual distance"):
        vae_loss(video, video, perceptual_weight=0.5, kl_weight=0.0)
    with pytest.raises(ValueError, match="not one of hinge"):
        discriminator_loss(video, video, "lsgan")  # type: ignore[arg-type]
    toy, _, _ = toy_setup()
    with pytest.raises(ValueError, match="belongs to no Conv3d"):
        LastConvRecorder.of(toy, nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="nothing was recorded"):
        LastConvRecorder(toy.dec2).weight_gradients(video)


@pytest.mark.parametrize("kind", ["hinge", "vanilla", "wgan-gp"])
def test_discriminator_losses_fall_when_logits_part(kind: Any) -> None:
    logits = torch.linspace(0, 1, 8)
    apart = discriminator_loss(logits + 3, logits - 3, kind)
    assert apart < discriminator_loss(logits, logits, kind)
