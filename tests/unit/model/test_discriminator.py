"""The discriminator: golden values and manifest, initialisation, precision, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import assert_close, assert_keys, cases_of, fill_by_rule, load_item, load_json, make_input
from torch import nn

from osora_cli.config.models.discriminator import DiscriminatorConfig
from osora_cli.errors import ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.discriminator import BatchNorm3dFp32, NLayerDiscriminator3D
from osora_cli.model.losses import discriminator_loss

ITEM, _ = load_item("discriminator")
MANIFEST = load_json("manifests/n_layer_discriminator_3d")


def eval_case(case: dict[str, Any]) -> dict[str, Any]:
    """The case that states keys and input: a training case says "same x" and follows its own."""
    cases = ITEM["cases"]
    return next(c for c in reversed(cases[: cases.index(case) + 1]) if isinstance(c["inputs"], dict))


def build(case: dict[str, Any]) -> NLayerDiscriminator3D:
    model = NLayerDiscriminator3D(DiscriminatorConfig(**case["kwargs"]))
    assert_keys(eval_case(case)["keys"], model)
    fill_by_rule(model)
    return model


@pytest.mark.parametrize("case", cases_of("discriminator"))
def test_golden(case: dict[str, Any]) -> None:
    model, x = build(case), make_input(eval_case(case)["inputs"]["x"])
    outputs = case["outputs"]
    training = "num_batches_tracked" in case
    model.train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    x.requires_grad_(True)
    out = model(x)
    assert_close(ITEM, outputs["out"], out)
    if training:
        dx, first = torch.autograd.grad(out.mean(), [x, model.main[0].weight])
        assert_close(ITEM, outputs["dx"], dx)
        assert_close(ITEM, outputs["first_conv_grad"], first)
        state = model.state_dict()
        assert set(outputs) - {"out", "dx", "first_conv_grad"} <= set(state)
        for name in set(outputs) & set(state):
            assert_close(ITEM, outputs[name], state[name])
        counts = {int(v) for k, v in state.items() if k.endswith("num_batches_tracked")}
        assert counts == {case["num_batches_tracked"]}
    else:
        assert set(outputs) == {"out"}


def test_manifest() -> None:
    with torch.device("meta"):
        model = NLayerDiscriminator3D(DiscriminatorConfig(**MANIFEST["config"]))
    assert_keys({key: shape for key, (shape, _) in MANIFEST["state_dict"].items()}, model)
    assert sum(p.numel() for p in model.parameters()) == MANIFEST["total_params"]
    assert [key for key, _ in model.named_buffers()] == MANIFEST["buffers"]


def test_fewer_layers() -> None:
    with torch.device("meta"):
        model = NLayerDiscriminator3D(DiscriminatorConfig(n_layers=3))
        assert sum(p.numel() for p in model.parameters()) == 4_665_729
        assert model(torch.empty(1, 3, 32, 256, 256)).shape == (1, 1, 8, 32, 32)
        assert model.logit_size(32, 256, 256) == (8, 32, 32)


@pytest.mark.parametrize(
    ("size", "logits"),
    [((32, 256, 256), (8, 8, 8)), ((1, 256, 256), (1, 8, 8)), ((4, 64, 96), (1, 2, 3)), ((9, 70, 33), (3, 3, 2))],
)
def test_logit_size(size: tuple[int, int, int], logits: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model = NLayerDiscriminator3D()
        assert model(torch.empty(1, 3, *size)).shape[2:] == logits
    assert model.logit_size(*size) == logits


@pytest.mark.parametrize("seed", [None, 0])
def test_initialisation(seed: int | None) -> None:
    torch.manual_seed(0)
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=32, n_layers=3))
    if seed is not None:
        model.reset_parameters(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
            assert float(module.weight.detach().mean()) == pytest.approx(0, abs=1e-3)
            if module.bias is not None:
                assert 0 < float(module.bias.detach().abs().max()) <= module.weight[0].numel() ** -0.5
        elif isinstance(module, nn.BatchNorm3d):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.4)
            assert float(module.weight.detach().mean()) == pytest.approx(1, abs=0.02)
            assert not module.bias.detach().any()


def test_initialisation_follows_the_seed() -> None:
    small = DiscriminatorConfig(ndf=4, n_layers=2)
    models = [NLayerDiscriminator3D(small) for _ in range(3)]
    models[0](torch.randn(2, 3, 2, 8, 8))  # its running statistics are put back as well
    for model, seed in zip(models, (5, 5, 6), strict=True):
        model.reset_parameters(seed)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["main.0.weight"], states[2]["main.0.weight"])


def test_running_statistics_stay_fp32_in_bf16() -> None:
    torch.manual_seed(0)
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=8, n_layers=3))
    same = NLayerDiscriminator3D(DiscriminatorConfig(ndf=8, n_layers=3))
    same(torch.randn(2, 3, 4, 32, 32))
    model.load_state_dict(same.state_dict())
    state = model.bfloat16().state_dict()
    assert {v.dtype for k, v in state.items() if "running" in k} == {torch.float32}
    assert {v.dtype for k, v in state.items() if k.endswith((".weight", ".bias"))} == {torch.bfloat16}
    assert all(torch.equal(state[k], v) for k, v in same.state_dict().items() if "running" in k)
    assert model(torch.randn(2, 3, 4, 32, 32).bfloat16()).dtype == torch.bfloat16


def test_running_mean_reaches_the_batch_mean_in_bf16() -> None:
    norm = BatchNorm3dFp32(2).bfloat16()
    x = torch.randn(64, 2, 1, 8, 8, generator=torch.Generator().manual_seed(3)).bfloat16() + 1
    for _ in range(120):
        norm(x)
    # In bf16 it stops where a tenth of the distance is half a unit in the last place: 0.98.
    torch.testing.assert_close(norm.running_mean, x.float().mean((0, 2, 3, 4)), rtol=0, atol=1e-4)


def test_autocast_runs_in_bf16() -> None:
    torch.manual_seed(0)
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=8, n_layers=3)).eval()
    x = torch.randn(1, 3, 4, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    want = model(x).detach()
    assert float((out.float() - want).norm() / want.norm()) < 2e-2


def test_bf16_gradients_of_short_clips() -> None:
    """Two frames reach the inner levels, where a plain convolution's bf16 gradient is wrong on some CPUs."""
    torch.manual_seed(0)
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=8, n_layers=3)).eval()
    x = torch.randn(2, 3, 8, 32, 32)
    gradients = []
    for low in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = model(x).float().square().mean()
        gradients.append(torch.autograd.grad(loss, [p for p in model.parameters() if p.dim() > 1]))
    for want, got in zip(*gradients, strict=True):
        assert float((got - want).norm() / want.norm()) < 0.1


def test_one_value_per_channel_is_refused_with_the_reason() -> None:
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=4))
    with pytest.raises(ConfigError, match="batch norm one value a channel") as caught:
        model(torch.zeros(1, 3, 4, 32, 32))
    assert "n_layers" in str(caught.value)
    assert torch.isfinite(model(torch.zeros(2, 3, 4, 32, 32))).all()
    assert torch.isfinite(model(torch.zeros(1, 3, 1, 33, 32))).all()
    model.eval()
    assert torch.isfinite(model(torch.zeros(1, 3, 4, 32, 32))).all()


def test_built_by_type() -> None:
    config = {"type": "N_Layer_discriminator_3D", "input_nc": 3, "ndf": 4, "n_layers": 2}
    model = build_model(config, seed=5, dtype=torch.bfloat16)
    assert isinstance(model, NLayerDiscriminator3D)
    state, same = model.state_dict(), build_model(config, seed=5).state_dict()
    assert torch.equal(state["main.0.weight"], same["main.0.weight"].bfloat16())
    assert state["main.3.running_var"].dtype == torch.float32
    assert torch.equal(state["main.3.running_var"], torch.ones(8))


def test_it_learns_to_tell_two_kinds_apart() -> None:
    torch.manual_seed(0)
    model = NLayerDiscriminator3D(DiscriminatorConfig(ndf=8, n_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    smooth = torch.linspace(-1, 1, 16).expand(4, 3, 2, 16, 16)
    rough = smooth + 0.5 * torch.randn(4, 3, 2, 16, 16)
    losses = []
    for _ in range(40):
        loss = discriminator_loss(model(smooth), model(rough))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]  # dropout is active, so single values jump
