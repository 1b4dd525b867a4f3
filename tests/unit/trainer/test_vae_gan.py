"""The second stage's task: what it differentiates, what it draws, and that its numbers stay finite."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.tiny_task import GAN, batch, clips, made, perceptual
from torch import nn

from osora_cli.data.transforms import normalize
from osora_cli.engine.native import NativeEngine
from osora_cli.model.losses import discriminator_loss
from osora_cli.trainer.task import StepContext
from osora_cli.trainer.vae import VaeTask
from osora_cli.trainer.vae_gan import GanSettings, VaeGanTask


def context(update: int, micro: int = 0, accumulation: int = 1) -> StepContext:
    return StepContext(seed=3, update=update, micro=micro, accumulation=accumulation, rank=0, world_size=1)


def discriminator(task: VaeTask | VaeGanTask) -> nn.Module:
    return task.networks["discriminator"].module


def gradients(task: VaeTask | VaeGanTask, name: str) -> dict[str, torch.Tensor]:
    found = {k: p.grad for k, p in task.networks[name].module.named_parameters()}
    return {k: g.clone() for k, g in found.items() if g is not None}


def without_dropout(task: VaeTask | VaeGanTask) -> VaeTask | VaeGanTask:
    for module in discriminator(task).modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return task


def test_each_network_gets_the_gradient_of_its_own_loss() -> None:
    """Against plain autograd over both networks: adaptive weight from the last layer's own gradients, fake detached."""
    task = without_dropout(made(2))
    model, disc = task.networks["model"].module, copy.deepcopy(discriminator(task))
    values = task.micro_step(clips(0), context(0))
    video = normalize(clips(0).video)
    recon = model(video)[0]
    nll = (recon - video).abs().sum() / 16
    gen = -disc(recon).mean()
    last = model.get_last_layer()
    a, b = (torch.autograd.grad(x, last, retain_graph=True)[0].norm() for x in (nll, gen))
    weight = (a / (b + 1e-4)).clamp(0, 1e4) * 0.1
    wanted = torch.autograd.grad(nll + weight.detach() * gen, list(model.parameters()), retain_graph=True)
    got = gradients(task, "model")
    for (key, _), want in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(got[key], want, rtol=2e-3, atol=2e-4 * float(want.abs().max() + 1e-12))
    torch.testing.assert_close(values["d_weight"], weight, rtol=1e-3, atol=0)
    torch.testing.assert_close(values["loss"], nll + weight * gen, rtol=1e-4, atol=0)
    loss = discriminator_loss(disc(video), disc(recon.detach()))
    theirs = gradients(task, "discriminator")
    for (key, _), want in zip(disc.named_parameters(), torch.autograd.grad(loss, list(disc.parameters())), strict=True):
        torch.testing.assert_close(theirs[key], want, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(values["disc_loss"], loss.detach())
    statistics = dict(discriminator(task).named_buffers())
    assert all(int(v) == 3 for k, v in statistics.items() if k.endswith("num_batches_tracked"))


def test_accumulation_averages() -> None:
    whole, parts = without_dropout(made(2, clip=0.0)), without_dropout(made(2, clip=0.0))
    for micro in range(3):
        parts.micro_step(clips(5), context(0, micro, 3))
    whole.micro_step(clips(5), context(0))
    for name in ("model", "discriminator"):
        a, b = gradients(whole, name), gradients(parts, name)
        largest = max(float(g.abs().max()) for g in a.values())
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=1e-4, atol=1e-5 * largest)


def test_dropout_hangs_on_the_place_in_the_run_and_on_nothing_else() -> None:
    losses = []
    for noise in (0, 1):
        task = made(2)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        losses.append([float(task.micro_step(clips(1), context(n))["disc_loss"]) for n in (0, 0, 1)])
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]


def test_before_its_start_the_discriminator_is_only_looked_through() -> None:
    task = made(2, gan=GanSettings(0, 0, 1.0, 0.1, False, 3, 1.0, "hinge"))
    before = {k: v.clone() for k, v in discriminator(task).named_parameters()}
    for n in range(3):
        values = task.micro_step(clips(n), context(n))
        results = task.update(n)
        assert ("disc_loss" in values) == ("discriminator" in results) == (n == 2)
        same = all(torch.equal(before[k], v) for k, v in discriminator(task).named_parameters())
        assert same == (n < 2)


def test_the_ramp_of_the_adversarial_term() -> None:
    gan = GanSettings(4, 3, 2.0, 0.1, False, 0, 1.0, "hinge")
    assert [gan.gen_factor_at(n) for n in range(3, 10)] == [2.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert GanSettings(0, 1, 2.0, 0.1, False, 0, 1.0, "hinge").gen_factor_at(1) == 1.0
    assert GanSettings(0, 9, None, 0.1, False, 0, 1.0, "hinge").gen_factor_at(1) is None


def test_infinities_leave_weights_and_statistics_as_they_were() -> None:
    task = made(2)
    task.micro_step(clips(0), context(0))
    task.update(0)
    held = {f"{n}.{k}": v.clone() for n, t in task.networks.items() for k, v in t.module.state_dict().items()}
    with torch.no_grad():
        weight = next(discriminator(task).parameters())
        kept = weight.clone()
        weight[0] = float("inf")
    task.micro_step(clips(1), context(1))
    results = task.update(1)
    assert [float(r.skipped) for r in results.values()] == [1.0, 1.0]
    with torch.no_grad():
        weight.copy_(kept)
    for name, trained in task.networks.items():
        for key, value in trained.module.state_dict().items():
            if not key.endswith("num_batches_tracked"):
                assert torch.equal(value, held[f"{name}.{key}"]), key


def test_the_weight_is_the_ranks_mean_or_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "mean_over_ranks", lambda self, values: torch.full_like(values, 7.0))
    assert float(made(2).micro_step(clips(0), context(0))["d_weight"]) == 7.0
    own = made(2, gan=replace(GAN, weight_per_rank=True))
    assert float(own.micro_step(clips(0), context(0))["d_weight"]) != 7.0


KINDS = {"black": 0.0, "grey": 127.0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "colour"])
def test_constant_clips_alone_in_a_batch_give_finite_numbers(kind: str, stage: int, dtype: str) -> None:
    video = torch.full((1, 3, 4, 16, 16), KINDS.get(kind, 0.0))
    if kind == "colour":
        video += torch.tensor([200.0, 30.0, 90.0]).reshape(1, 3, 1, 1, 1)
    task = made(stage, dtype, lpips=perceptual())
    for n in range(20):
        values = task.micro_step(batch(video), context(n))
        results = task.update(n)
        numbers = {**values, **{f"norm {k}": r.grad_norm for k, r in results.items()}}
        assert [k for k, v in numbers.items() if not torch.isfinite(v)] == [], f"update {n}"
        assert all(float(r.skipped) == 0 for r in results.values())
    for trained in task.networks.values():
        assert all(torch.isfinite(v).all() for v in trained.module.state_dict().values())
