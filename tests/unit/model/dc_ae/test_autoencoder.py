"""The Video DC-AE as a module: sizes, scaling, initialisation, precision, recomputation, the last layer."""

from __future__ import annotations

import pytest
import torch
from support.dc_ae import light_config, lively, small_config
from torch import Tensor, nn

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.errors import ConfigError
from osora_cli.model.dc_ae.autoencoder import DcAe


def clip(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)


@pytest.fixture(scope="module")
def net() -> DcAe:
    return lively(DcAe(small_config())).eval()


@pytest.mark.parametrize(("time", "space"), [(1, 1), (1, 4), (2, 4), (4, 8), (8, 8)])
def test_sizes(time: int, space: int) -> None:
    model = DcAe(light_config(time, space))
    model.reset_parameters(0)
    assert (model.time_compression_ratio, model.spatial_compression_ratio, model.latent_channels) == (time, space, 2)
    with torch.no_grad():
        for frames in (1, 2 * time, 3 * time):
            rec, posterior, z = model(clip(2, 3, frames, 2 * space, 3 * space))
            assert list(rec.shape) == [2, 3, frames, 2 * space, 3 * space]
            assert list(z.shape) == [2, 2, max(1, frames // time), 2, 3]
            assert posterior is None


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 16, 16), "`3` frames does not come back"),
        ((4, 16, 16), "`4` frames does not come back"),
        ((8, 12, 16), "height `12` px"),
        ((8, 16, 20), "width `20` px"),
    ],
)
def test_forward_refuses_what_would_change_size(net: DcAe, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        net(clip(1, 3, *shape))


def test_encode_takes_what_the_halvings_take(net: DcAe) -> None:
    with torch.no_grad():
        assert [net.encode(clip(1, 3, n, 8, 8)).shape[2] for n in (1, 2, 4, 8, 12)] == [1, 1, 1, 2, 3]
    for frames in (3, 5, 6, 10):
        with pytest.raises(ConfigError, match=f"`{frames}` frames cannot be encoded"):
            net.encode(clip(1, 3, frames, 8, 8))


@pytest.mark.parametrize("frames", [1, 8])
def test_a_batch_is_its_clips_one_by_one(net: DcAe, frames: int) -> None:
    x = clip(3, 3, frames, 16, 24)
    with torch.no_grad():
        rec, _, z = net(x)
        alone = [net(one) for one in x.split(1)]
    torch.testing.assert_close(rec, torch.cat([r for r, _, _ in alone]), rtol=0, atol=1e-5)
    torch.testing.assert_close(z, torch.cat([z for _, _, z in alone]), rtol=0, atol=1e-5)


def test_the_layout_of_the_input_does_not_matter(net: DcAe) -> None:
    x = clip(2, 3, 8, 16, 16)
    views = [x.contiguous(memory_format=torch.channels_last_3d), x.transpose(3, 4).contiguous().transpose(3, 4)]
    with torch.no_grad():
        want = net(x)[0]
        for view in views:
            torch.testing.assert_close(net(view)[0], want, rtol=0, atol=0)


def test_latents_are_divided_by_the_scaling_factor(net: DcAe) -> None:
    scaled = DcAe(small_config(scaling_factor=0.493))
    raw = DcAe(small_config(scaling_factor=0.493, is_training=True))
    for other in (scaled, raw):
        other.load_state_dict(net.state_dict())
    x = clip(1, 3, 8, 16, 16)
    with torch.no_grad():
        rec, _, z = net(x)
        rec_scaled, _, z_scaled = scaled(x)
        torch.testing.assert_close(z_scaled, z / 0.493, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rec_scaled, rec, rtol=0, atol=1e-5)
        torch.testing.assert_close(raw(x)[2], z, rtol=0, atol=0)


def test_initialisation_is_seeded_and_that_of_training_from_scratch() -> None:
    one, same, other = (DcAe(small_config()) for _ in range(3))
    one.reset_parameters(7)
    torch.manual_seed(1)
    same.reset_parameters(7)
    other.reset_parameters(8)
    weights = []
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if name.endswith("bias"):
            assert not a.any()
            continue
        assert not torch.equal(a, c)
        weights.append(a.detach().flatten())
    every = torch.cat(weights)
    assert float(every.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(every.mean())) < 2e-4
    norms = [value.detach() for name, value in one.named_parameters() if name.endswith("norm.weight")]
    assert float(torch.cat(norms).abs().max()) < 0.1  # not around 1


def test_no_two_weights_are_alike() -> None:
    model = DcAe(small_config())
    model.reset_parameters(0)
    firsts = [float(value.detach().flatten()[0]) for name, value in model.named_parameters() if name.endswith("weight")]
    assert len(set(firsts)) == len(firsts)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("frames", [1, 8])
def test_bf16_stays_near_fp32(net: DcAe, frames: int) -> None:
    x = clip(2, 3, frames, 16, 24)
    half = DcAe(small_config())
    half.load_state_dict(net.state_dict())
    half.to(torch.bfloat16)
    with torch.no_grad():
        rec, _, z = net(x)
        rec_half, _, z_half = half(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rec_auto, _, z_auto = net(x)
    assert rec_half.dtype == torch.float32  # that of x
    assert z_half.dtype == z_auto.dtype == torch.bfloat16
    assert max(relative(rec_half, rec), relative(z_half, z)) < 2e-2
    assert max(relative(rec_auto, rec), relative(z_auto, z)) < 2e-2


def test_bf16_gradients_stay_near_fp32() -> None:
    model, x = lively(DcAe(small_config())), clip(2, 3, 8, 16, 16)
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            rec, _, _ = model(x)
        (rec.float() - x).abs().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]
    assert relative(grads[1], grads[0]) < 5e-2


class Calls:
    """How often each unit of recomputation ran."""

    def __init__(self, model: DcAe) -> None:
        self.counts: dict[str, int] = {}
        for name, module in self.units(model).items():
            # Before, not after: recomputation stops inside the unit once it has what is needed.
            module.register_forward_pre_hook(self._counter(name))

    def _counter(self, name: str):  # type: ignore[no-untyped-def]
        def count(*_: object) -> None:
            self.counts[name] = self.counts.get(name, 0) + 1

        return count

    @staticmethod
    def units(model: DcAe) -> dict[str, nn.Module]:
        ends = {f"{side}.{end}" for side in ("encoder", "decoder") for end in ("project_in", "project_out")}
        return {n: m for n, m in model.named_modules() if n in ends or n.rpartition(".")[0].endswith(".stages")}


@pytest.mark.parametrize("shape", [(2, 3, 8, 16, 16), (1, 3, 1, 24, 40), (3, 3, 12, 8, 24)])
def test_recomputation_leaves_gradients_as_they_are(shape: tuple[int, ...]) -> None:
    x, grads, counts = clip(*shape), [], []
    for recompute, keep_last in ((False, False), (True, False), (True, True)):
        model = lively(DcAe(small_config(disc_off_grad_ckpt=keep_last)))
        if recompute:
            model.enable_grad_checkpoint()
        calls = Calls(model)
        rec, _, z = model(x)
        ((rec - x).square().mean() + z.square().mean()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
        counts.append(calls.counts)
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-5)
    once, all_twice, but_last = counts
    assert set(once.values()) == {1}
    assert {name for name, n in all_twice.items() if n == 1} == {"encoder.project_in"}
    assert {name for name, n in but_last.items() if n == 1} == {"encoder.project_in", "decoder.project_out"}


def test_no_recomputation_without_gradients() -> None:
    model = lively(DcAe(small_config()))
    model.enable_grad_checkpoint()
    calls = Calls(model)
    with torch.no_grad():
        model(clip(1, 3, 8, 8, 8))
    assert set(calls.counts.values()) == {1}
    model.enable_grad_checkpoint(False)
    model(clip(1, 3, 8, 8, 8))[0].sum().backward()
    assert set(calls.counts.values()) == {2}


@pytest.mark.parametrize("keep_last", [False, True])
def test_gradient_at_the_last_layer_through_recomputation(keep_last: bool) -> None:
    """The adaptive weight asks for it by `autograd.grad`, twice, before the backward pass."""
    x, norms = clip(1, 3, 8, 16, 16), []
    for recompute in (False, True):
        model = lively(DcAe(small_config(disc_off_grad_ckpt=keep_last)))
        if recompute:
            model.enable_grad_checkpoint()
        last = model.get_last_layer()
        assert last is model.state_dict(keep_vars=True)["decoder.project_out.op_list.2.conv.weight"]
        rec, _, _ = model(x)
        loss = (rec - x).abs().mean()
        first, second = (torch.autograd.grad(loss * k, last, retain_graph=True)[0] for k in (1.0, 2.0))
        loss.backward()
        assert last.grad is not None
        torch.testing.assert_close(first, last.grad)
        norms.append(torch.stack([first.norm(), second.norm()]))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-7)


def test_float16_sums_do_not_overflow() -> None:
    """Linear attention over many positions with large values: fp16 is raised to fp32 for its sums."""
    from osora_cli.model.dc_ae.blocks import LiteMLA

    attention = LiteMLA(32, scales=())
    qkv = torch.full((1, 96, 4, 16, 16), 20.0, dtype=torch.float16)
    out = attention.attend(qkv)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.full_like(out, 20.0))


def test_attention_without_positive_queries_is_zero() -> None:
    from osora_cli.model.dc_ae.blocks import LiteMLA

    out = LiteMLA(32, scales=()).attend(torch.full((1, 96, 1, 2, 2), -1.0))
    assert not out.any()


def test_the_known_architecture_takes_no_other_settings() -> None:
    with pytest.raises(ConfigError, match="latent_channels is `64`"), torch.device("meta"):
        DcAe(DcAeConfig(model_name="dc-ae-f32t4c128", latent_channels=64))
