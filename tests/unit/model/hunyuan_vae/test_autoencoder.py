"""What the HunyuanVideo VAE does beyond its golden values: interface, tiling, causality, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import fill_by_rule
from torch import Tensor

from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig, check_clip, strides
from osora_cli.errors import ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.hunyuan_vae.layers import CausalConv3d, frame_causal_attention
from osora_cli.model.hunyuan_vae.posterior import DiagonalGaussian
from osora_cli.model.losses import LastConvRecorder, adaptive_weight, vae_gan_loss, vae_loss

TINY: dict[str, Any] = {
    "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 8, "block_out_channels": [8, 8, 16, 16],
    "sample_size": 32, "sample_tsize": 16,
}  # fmt: skip


def tiny(**options: Any) -> HunyuanVae:
    model = HunyuanVae(HunyuanVaeConfig(**{**TINY, **options}))
    fill_by_rule(model)
    return model.eval()


def clip(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)


def test_interface_that_conditioning_needs() -> None:
    """The reference's VAE has no `cfg.latent_channels`, on which its conditioning fails; ours says what it is."""
    model = tiny()
    assert (model.latent_channels, model.time_compression_ratio, model.spatial_compression_ratio) == (4, 4, 8)
    assert model.is_causal
    assert model.latent_size(5, 16, 24) == (2, 2, 3)
    assert tuple(model.encode(clip(1, 3, 5, 16, 24)).shape) == (1, model.latent_channels, *model.latent_size(5, 16, 24))


@torch.no_grad()
def test_encode_is_the_one_path_to_latents() -> None:
    """Moments through quant_conv, drawn, shifted and scaled: never the bare encoder's doubled channels."""
    model, x = tiny(scale_factor=0.36, shift_factor=0.12), clip(1, 3, 5, 16, 24)
    mean, logvar = model.quant_conv(model.encoder(x)).chunk(2, dim=1)
    torch.testing.assert_close(model.encode(x, sample_posterior=False), (mean - 0.12) * 0.36)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(7))
    drawn = model.encode(x, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(drawn, (mean + (0.5 * logvar).exp() * noise - 0.12) * 0.36)
    assert torch.equal(drawn, model.encode(x, generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(drawn, model.encode(x, generator=torch.Generator().manual_seed(8)))
    rec, posterior, z = model(x, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(z, drawn)
    torch.testing.assert_close(rec, model.decode(drawn))
    torch.testing.assert_close(posterior.mean, mean)


@torch.no_grad()
def test_slicing_and_batches_agree() -> None:
    x = clip(3, 3, 5, 16, 16)
    z = tiny().encode(x, sample_posterior=False)
    torch.testing.assert_close(tiny(use_slicing=True).encode(x, sample_posterior=False), z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tiny(use_slicing=True).decode(z), tiny().decode(z), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "options", [{}, {"tile_overlap_factor": 0.5}, {"tile_overlap_factor": 0.3}, {"tile_overlap_factor": 0}]
)
@torch.no_grad()
def test_temporal_tiles_lose_and_gain_no_frame(options: dict[str, Any]) -> None:
    """Any length, any overlap: as many frames as without tiles."""
    tiled, plain = tiny(use_temporal_tiling=True, **options), tiny()
    for frames in range(1, 70, 4):
        z = tiled.encode(clip(1, 3, frames, 8, 8), sample_posterior=False)
        assert z.shape[2] == plain.latent_size(frames, 8, 8)[0], frames
        assert tiled.decode(z).shape == (1, 3, frames, 8, 8), frames


@torch.no_grad()
def test_temporal_encode_of_lengths_between() -> None:
    tiled = tiny(use_temporal_tiling=True)
    for frames in (18, 19, 20, 30, 32, 34, 35):
        assert tiled.encode(clip(1, 3, frames, 8, 8)).shape[2] == (frames - 1) // 4 + 1


@pytest.mark.parametrize("size", [(40, 32), (33, 64), (56, 88), (100, 40)])
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.3, 0.0])
@torch.no_grad()
def test_spatial_tiles_keep_sizes(size: tuple[int, int], overlap: float) -> None:
    model = tiny(use_spatial_tiling=True, tile_overlap_factor=overlap)
    z = model.encode(clip(1, 3, 1, *size), sample_posterior=False)
    assert z.shape[2:] == model.latent_size(1, *size)
    assert model.decode(z).shape[3:] == tuple(8 * n for n in z.shape[3:])


@torch.no_grad()
def test_tiles_equal_the_whole_on_a_constant_clip() -> None:
    """Norms and attention span what they are given, so only here must tiles be exact: nothing varies over the clip."""
    options = {"norm_num_groups": 2}  # several channels a group: their spread is what the norms divide by
    model, tiled = tiny(**options), tiny(use_spatial_tiling=True, use_temporal_tiling=True, **options)
    x = torch.full((1, 3, 33, 72, 56), 0.3)
    z = model.encode(x, sample_posterior=False)
    torch.testing.assert_close(tiled.encode(x, sample_posterior=False), z, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(tiled.decode(z), model.decode(z), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_short_clips_and_small_frames_are_not_tiled() -> None:
    model, tiled = tiny(), tiny(use_spatial_tiling=True, use_temporal_tiling=True)
    x = clip(1, 3, 13, 32, 24)
    assert torch.equal(tiled.encode(x, sample_posterior=False), model.encode(x, sample_posterior=False))


def test_convolution_and_attention_look_back_only() -> None:
    conv, x = CausalConv3d(2, 2), clip(1, 2, 5, 4, 4).requires_grad_(True)
    (gradient,) = torch.autograd.grad(conv(x)[:, :, 2].sum(), x)
    seen = gradient.abs().sum(dim=(0, 1, 3, 4)) > 0
    assert seen.tolist() == [True, True, True, False, False]

    q, k, v = torch.randn(3, 2, 12, 8)
    mask = torch.tril(torch.ones(4, 4)).repeat_interleave(3, 0).repeat_interleave(3, 1).bool()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(frame_causal_attention(q, k, v, 4), dense)


@pytest.mark.parametrize("shape", [(1, 3, 5, 16, 24), (2, 3, 1, 8, 16), (1, 3, 9, 24, 8)])
def test_gradients_with_checkpointing_are_the_same(shape: tuple[int, ...]) -> None:
    x, gradients = clip(*shape), []
    for checkpointing in (False, True):
        model = tiny()
        model.enable_grad_checkpoint(checkpointing)
        rec, posterior, _ = model(x, generator=torch.Generator().manual_seed(0))
        (rec.square().mean() + 0.01 * posterior.kl().mean()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        recomputed = gradients[1][name]
        assert plain is not None
        assert recomputed is not None
        assert float((plain - recomputed).abs().max()) <= 1e-5 * float(plain.abs().max()) + 1e-12, name


def test_adaptive_weight_on_this_model() -> None:
    """The last convolution sees a padded input; its recorded form is what the weight-VJP takes."""
    x, d = clip(1, 3, 5, 16, 16), torch.nn.Conv3d(3, 1, 3)
    model = tiny()
    model.enable_grad_checkpoint()
    rec, posterior, _ = model(x, sample_posterior=False)
    last = model.get_last_layer()
    norms = [
        torch.autograd.grad(loss, last, retain_graph=True)[0].norm()
        for loss in (vae_loss(x, rec, perceptual_weight=0, kl_weight=0).nll, -d(rec).mean())
    ]
    want = float(adaptive_weight(norms[0], norms[1], 0.05))
    recorder = LastConvRecorder.of(model, last)
    with recorder:
        rec, posterior, _ = model(x, sample_posterior=False)
    loss = vae_gan_loss(
        x, rec, recorder, d, update=0, perceptual_weight=0, kl_weight=1e-4, posterior=posterior, disc_weight=0.05
    )
    assert float(loss.weight) == pytest.approx(want, rel=1e-5)
    loss.objective.backward()
    assert model.quant_conv.weight.grad is not None


def test_posterior_bounds_and_kl() -> None:
    moments = torch.zeros(2, 2, 1, 2, 2)
    moments[0, 1] = 100.0
    moments[1, 1] = -100.0
    posterior = DiagonalGaussian.from_moments(moments)
    assert posterior.logvar[0].unique().tolist() == [20.0]
    assert posterior.logvar[1].unique().tolist() == [-30.0]
    assert DiagonalGaussian(torch.zeros(3, 2, 1, 1, 1), torch.zeros(3, 2, 1, 1, 1)).kl().tolist() == [0.0] * 3
    assert torch.equal(posterior.mode(), posterior.mean)


def test_sizes_that_do_not_come_back_are_refused() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match="`6` frames come back") as caught:
        model(clip(1, 3, 6, 16, 16))
    assert "5 or 9 frames" in str(caught.value)
    with pytest.raises(ConfigError, match="`20x16` px"):
        check_clip(model.config, 5, 20, 16)
    check_clip(model.config, 1, 8, 16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_spatial_tiling": True, "sample_size": 60}, "sample_size `60` px"),
        ({"use_temporal_tiling": True, "sample_tsize": 18}, "sample_tsize `18` frames"),
        ({"block_out_channels": [8, 8, 12, 16]}, "`12`"),
        ({"block_out_channels": [8, 16]}, "`2` blocks"),
    ],
)
def test_configs_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HunyuanVae(HunyuanVaeConfig(**{**TINY, **options}))


def test_strides_of_both_ratios() -> None:
    assert strides(HunyuanVaeConfig()) == [(1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 1, 1)]
    assert strides(HunyuanVaeConfig(time_compression_ratio=8)) == [(2, 2, 2)] * 3 + [(1, 1, 1)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_built_by_type(device: str) -> None:
    config = {**TINY, "type": "hunyuan_vae"}
    model = build_model(config, device=device, dtype=torch.bfloat16, seed=3)
    assert isinstance(model, HunyuanVae)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {device}


def test_initialisation_by_seed() -> None:
    model, other = HunyuanVae(HunyuanVaeConfig(**TINY)), HunyuanVae(HunyuanVaeConfig(**TINY))
    model.reset_parameters(3)
    other.reset_parameters(3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    weight = model.decoder.conv_in.conv.weight.detach()
    bound = (4 * 27) ** -0.5
    assert bound * 0.9 < float(weight.abs().max()) <= bound
    assert torch.equal(model.encoder.conv_norm_out.weight, torch.ones(16))
    other.reset_parameters(4)
    assert not torch.equal(weight, other.decoder.conv_in.conv.weight)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@torch.no_grad()
def test_half_precision_is_near_fp32() -> None:
    """Under autocast the residual stream and all at the latents' resolution stay fp32: nearer than all in bf16."""
    x, model = clip(1, 3, 5, 32, 40), tiny(layers_per_block=2, block_out_channels=[16, 16, 32, 32])
    z = model.encode(x, sample_posterior=False)
    rec = model.decode(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z_autocast, rec_autocast = model.encode(x, sample_posterior=False), model.decode(z)
    assert relative(z_autocast, z) < 2.5e-2
    assert relative(rec_autocast, rec) < 2.5e-2

    model.bfloat16()
    assert model.encode(x, sample_posterior=False).dtype == torch.bfloat16
    assert relative(model.encode(x, sample_posterior=False), z) < 5e-2
    assert 2 * relative(rec_autocast, rec) < relative(model.decode(z), rec) < 0.15
    assert model(x, sample_posterior=False)[0].dtype == torch.float32  # as the clip came


def test_gradients_under_autocast_with_checkpointing() -> None:
    x, gradients = clip(1, 3, 5, 16, 24), []
    for checkpointing in (False, True):
        model = tiny()
        model.enable_grad_checkpoint(checkpointing)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rec, _, _ = model(x, sample_posterior=False)
        rec.square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
