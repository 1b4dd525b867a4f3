"""What training, evaluation, sampling and the cache share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mmdit import small_model
from support.tiny_diffusion import CONFIG, DC_AE, HUNYUAN
from torch import Tensor

from osora_cli.model.build import build_model
from osora_cli.model.latents import FrozenParts, TextBundle, embed_texts, encode_latents, null_text, predict_velocity
from osora_cli.model.mmdit.packing import make_tokens, pack_condition, unpack


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clips(batch: int, frames: int, size: int = 32) -> Tensor:
    return torch.rand(batch, 3, frames, size, size, generator=generator()) * 2 - 1


@pytest.mark.parametrize(("section", "frames"), [(HUNYUAN, 9), (DC_AE, 8)])
def test_how_many_clips_are_encoded_at_a_time_changes_nothing(section: dict[str, Any], frames: int) -> None:
    ae: Any = build_model(section)
    video = clips(3, frames)
    whole = encode_latents(ae, video, generator())
    assert not whole.requires_grad
    for size in (1, 2):
        assert torch.allclose(encode_latents(ae, video, generator(), batch_size=size), whole, atol=1e-6)
    assert whole.shape[1:3] == (ae.latent_channels, (frames - 1) // ae.time_compression_ratio + 1)


def test_a_hunyuan_latent_is_a_scaled_draw_from_its_posterior() -> None:
    ae: Any = build_model(HUNYUAN)
    video = clips(2, 9)
    posterior = ae.posterior(video)
    noise = torch.randn(posterior.mean.shape, generator=generator())
    want = (posterior.mean + torch.exp(0.5 * posterior.logvar) * noise) * 0.476986
    assert torch.allclose(encode_latents(ae, video, generator()), want, atol=1e-6)
    assert torch.allclose(encode_latents(ae, video), posterior.mean * 0.476986, atol=1e-6)


def test_a_dc_ae_latent_is_scaled_and_made_in_tiles() -> None:
    plain: Any = build_model(DC_AE)
    tiles = {"use_temporal_tiling": True, "temporal_tile_size": 8, "tile_overlap_factor": 0.25}
    scaled: Any = build_model({**DC_AE, "scaling_factor": 0.5, **tiles})
    short, long = clips(1, 8), clips(1, 16)
    assert torch.allclose(encode_latents(scaled, short), encode_latents(plain, short) / 0.5, atol=1e-6)
    assert torch.allclose(encode_latents(scaled, long), scaled.encode(long), atol=1e-6)
    assert not torch.allclose(encode_latents(scaled, long), encode_latents(plain, long) / 0.5, atol=1e-6)


def test_latents_come_in_the_autoencoders_dtype() -> None:
    ae: Any = build_model(DC_AE, dtype=torch.bfloat16)
    assert encode_latents(ae, clips(1, 8)).dtype == torch.bfloat16


def parts() -> FrozenParts:
    t5: Any = build_model(CONFIG["t5"])
    clip: Any = build_model(CONFIG["clip"])
    return FrozenParts(None, t5, clip)


def test_texts_and_the_empty_one() -> None:
    both = embed_texts(parts(), ["a cat", ""])
    null = null_text(parts())
    assert (len(both), both.t5.shape, both.clip.shape) == (2, (2, 8, 16), (2, 12))
    assert torch.equal(both.t5[1:], null.t5)
    assert torch.equal(both.clip[1:], null.clip)
    longer = null.extended(11)
    assert torch.equal(longer.t5[:, 8:], null.t5[:, -1:].expand(-1, 3, -1))
    with pytest.raises(ValueError, match="not built"):
        embed_texts(FrozenParts(None, None, None), ["a"])


@pytest.mark.parametrize("patch", [1, 2])
def test_velocity_is_the_models_on_packed_tokens(patch: int) -> None:
    model = small_model(patch_size=patch, cond_embed=True, guidance_embed=True)
    channels = 16 // patch**2
    x = torch.randn(2, channels, 3, 4, 6, generator=generator())
    mask = torch.zeros(2, 1, 3, 4, 6)
    mask[:, :, 0] = 1
    text = TextBundle(torch.randn(1, 5, 12, generator=generator(4)), torch.randn(1, 10, generator=generator(5)))
    times = torch.tensor([0.2, 0.7])
    got = predict_velocity(model, x, times, text, torch.cat([mask, mask * x], dim=1), 4.0, patch_size=patch)
    tokens = make_tokens(x, text.t5, text.clip, patch)
    want = model(
        tokens.img, tokens.img_ids, tokens.txt, tokens.txt_ids, times, tokens.y_vec,
        pack_condition(mask, x, patch), torch.full((2,), 4.0),
    )  # fmt: skip
    assert torch.equal(got, unpack(want, tokens.grid, patch))
    assert got.shape == x.shape
