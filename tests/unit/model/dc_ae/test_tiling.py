"""Tiles: sizes follow from one another, no frame is lost, borders are those of the definition."""

from __future__ import annotations

import pytest
import torch
from support.dc_ae import light_config, lively, small_config, tiled_decode, tiled_encode, untiled
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig, TileAxis
from osora_cli.errors import ConfigError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.tiling import Cut, blend, joined, reader, tile_time


def clip(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)


@pytest.mark.parametrize("frames", [52, 76, 100, 124, 60, 64])
@pytest.mark.parametrize(("tile", "overlap"), [(32, 0.25), (16, 0.25), (8, 0.5), (16, 0.0), (20, 0.6)])
def test_no_frame_is_lost(frames: int, tile: int, overlap: float) -> None:
    config = light_config(4, 4, use_temporal_tiling=True, temporal_tile_size=tile, tile_overlap_factor=overlap)
    model = lively(DcAe(config))
    x = clip(1, 3, frames, 4, 8)
    with torch.no_grad():
        rec, _, z = model(x)
        assert rec.shape == x.shape
        assert z.shape[2] == frames // 4
        torch.testing.assert_close(z, tiled_encode(model, x), rtol=0, atol=1e-5)
        torch.testing.assert_close(rec, tiled_decode(model, z), rtol=0, atol=1e-5)


def decode_stub(ratio: int):  # type: ignore[no-untyped-def]
    """A decoder that tells which latent frame each frame came from; one alone gives one frame, as the net's does."""

    def decode(z_BCTHW: Tensor) -> Tensor:
        return z_BCTHW if z_BCTHW.shape[2] == 1 else z_BCTHW.repeat_interleave(ratio, dim=2)

    return decode


def check_every_frame(latent: int, overlap: int, ratio: int, frames: int) -> None:
    z = torch.arange(frames, dtype=torch.float64).view(1, 1, -1, 1, 1)
    cut = Cut.decoding(TileAxis(latent, overlap, ratio))
    out = joined(list(tile_time(decode_stub(ratio), reader(z), z.shape[2], cut, least=2)))
    assert torch.equal(out.flatten(), z.flatten().repeat_interleave(ratio)), (latent, overlap, ratio, frames)


@pytest.mark.parametrize("latent", [2, 3, 4, 8])
def test_every_length_and_overlap(latent: int) -> None:
    for overlap in range(latent):
        for frames in range(latent + 1, 3 * latent + 4):
            check_every_frame(latent, overlap, 4, frames)


@pytest.mark.sweep
@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("latent", range(2, 13))
def test_every_length_and_overlap_at_large(latent: int, ratio: int) -> None:
    for overlap in range(latent):
        for frames in range(latent + 1, 6 * latent + 4):
            check_every_frame(latent, overlap, ratio, frames)


def test_spans_end_together_and_hold_at_least_what_is_asked() -> None:
    cut = Cut.decoding(TileAxis(4, 1, 4))
    assert cut.spans(7) == [(0, 4), (3, 7), (6, 7)]
    assert cut.spans(7, least=2) == [(0, 4), (3, 7)]
    assert cut.spans(8, least=2) == [(0, 4), (3, 7), (6, 8)]
    assert Cut.decoding(TileAxis(4, 0, 4)).spans(9, least=2) == [(0, 4), (4, 9)]


def test_blending_fades_from_the_forerunner() -> None:
    before, tile = torch.zeros(1, 1, 6, 1, 1), torch.ones(1, 1, 5, 1, 1)
    assert blend(before, tile, 4, 2).flatten().tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert blend(before, tile[:, :, :2], 4, 2).flatten().tolist() == [0.0, 0.5]
    assert blend(before, tile, 0, 2) is tile


@pytest.mark.parametrize("size", [(48, 56), (40, 24), (32, 72), (88, 88)])
def test_space_and_time_together(size: tuple[int, int]) -> None:
    settings = {"use_spatial_tiling": True, "use_temporal_tiling": True, "spatial_tile_size": 32}
    model = lively(DcAe(small_config(**settings, temporal_tile_size=16)))
    x = clip(2, 3, 28, *size)
    with torch.no_grad():
        rec, _, z = model(x)
        torch.testing.assert_close(z, tiled_encode(model, x), rtol=0, atol=1e-5)
        torch.testing.assert_close(rec, tiled_decode(model, z), rtol=0, atol=1e-5)
    assert rec.shape == x.shape


def test_the_latent_tile_follows_the_sample_tile() -> None:
    """48 px of a net that divides by 8 are 6 latents; nothing else has to be said."""
    settings = {"use_spatial_tiling": True, "spatial_tile_size": 48, "tile_overlap_factor": 0.5}
    model = DcAe(light_config(4, 8, **settings))
    assert model.space_tiles == TileAxis(6, 3, 8)
    assert model.time_tiles is None
    model.reset_parameters(0)
    with torch.no_grad():
        rec, _, z = model(clip(1, 3, 8, 96, 104))
    assert list(z.shape[2:]) == [2, 12, 13]
    assert list(rec.shape[2:]) == [8, 96, 104]


def test_clips_that_fit_a_tile_are_not_cut() -> None:
    settings = {"use_spatial_tiling": True, "use_temporal_tiling": True, "spatial_tile_size": 32}
    model = lively(DcAe(small_config(**settings, temporal_tile_size=16)))
    plain, x = untiled(model), clip(1, 3, 16, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], plain(x)[0], rtol=0, atol=0)


def test_latents_are_scaled_once_in_each_tile() -> None:
    settings = {"use_spatial_tiling": True, "spatial_tile_size": 32, "scaling_factor": 0.5}
    model, x = lively(DcAe(small_config(**settings))), clip(1, 3, 8, 48, 48)
    bare = DcAe(small_config(use_spatial_tiling=True, spatial_tile_size=32))
    bare.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.encode(x), bare.encode(x) / 0.5, rtol=0, atol=1e-5)


def test_gradients_go_through_tiles() -> None:
    settings = {"use_spatial_tiling": True, "use_temporal_tiling": True, "spatial_tile_size": 16}
    model = lively(DcAe(light_config(4, 8, **settings, temporal_tile_size=8, tile_overlap_factor=0.5)))
    x = clip(1, 3, 20, 24, 24).requires_grad_()
    model(x)[0].square().mean().backward()
    assert x.grad is not None
    assert bool((x.grad.abs().amax((0, 1, 3, 4)) > 0).all())
    assert all(p.grad is not None for p in model.parameters())


def test_images_are_cut_in_space_only() -> None:
    settings = {"use_spatial_tiling": True, "use_temporal_tiling": True, "spatial_tile_size": 32}
    model, x = lively(DcAe(small_config(**settings))), clip(2, 3, 1, 56, 40)
    with torch.no_grad():
        rec, _, z = model(x)
        torch.testing.assert_close(rec, tiled_decode(model, z), rtol=0, atol=1e-5)
    assert rec.shape == x.shape


@pytest.mark.parametrize(
    ("settings", "message", "cure"),
    [
        ({"spatial_tile_size": 100}, "`100` px is not a whole number of latents", "--model.spatial-tile-size 104"),
        ({"spatial_tile_size": 16}, "`0.25` of a tile of 16 px is 0.5 latents", "--model.tile-overlap-factor 0 or 0.5"),
        ({"temporal_tile_size": 4}, "`4` frames is not enough latents", "--model.temporal-tile-size 8"),
        ({"temporal_tile_size": 10}, "`10` frames is not a whole number", "--model.temporal-tile-size 12"),
        ({"tile_overlap_factor": 0.3}, "`0.3` of a tile of 32 frames is 2.4 latents", "0.25 or 0.375"),
    ],
)
def test_tiles_that_are_not_whole_latents_are_refused(settings: dict[str, object], message: str, cure: str) -> None:
    config = small_config(use_spatial_tiling=True, use_temporal_tiling=True, **settings)
    with pytest.raises(ConfigError, match=message) as caught:
        DcAe(config)
    assert cure in str(caught.value.hint)


def test_tiles_that_are_off_are_not_looked_at() -> None:
    DcAe(small_config(spatial_tile_size=1, temporal_tile_size=1, tile_overlap_factor=0.3))
    assert DcAeConfig().spatial_tile_size == 256
