"""Statistics of latents: the moments themselves, and the factors of both autoencoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.clips import make_clip
from support.golden import seeded_randn
from support.tiny_cache import cache_config, make_table
from support.tiny_diffusion import CAUSAL

from osora_cli.app.cache.latent_stats import Moments, latent_stats
from osora_cli.app.frozen_parts import build_frozen_parts
from osora_cli.data.transforms import normalize
from osora_cli.errors import DataError
from osora_cli.model.latents import encode_latents


def test_moments_joined_in_parts_are_those_of_all_at_once() -> None:
    values = seeded_randn((6, 3, 2, 4, 5), 3) * 0.01 + torch.tensor([1000.0, -2.0, 0.5]).view(1, 3, 1, 1, 1)
    moments = Moments()
    for part in values.split([1, 2, 3]):
        moments.add(part)
    flat = values.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(moments.mean_C, flat.mean(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.std_C, flat.std(dim=1, correction=0), rtol=1e-9, atol=0)
    assert moments.mean == pytest.approx(float(flat.mean()), rel=1e-12)
    assert moments.std == pytest.approx(float(flat.std(correction=0)), rel=1e-12)
    with pytest.raises(ValueError, match="not finite"):
        moments.add(values * float("nan"))


def test_a_dc_aes_factor_brings_its_latents_to_unit_deviation(tmp_path: Path) -> None:
    config = cache_config(make_table(tmp_path, clips=3))
    found = latent_stats(config, number=2)
    assert (found.clips, found.frames) == (2, 16)
    scaled = cache_config(tmp_path / "clips.csv", ae={**config.ae.model_dump(), **found.factors})
    again = latent_stats(scaled, number=2)
    assert again.raw.std == pytest.approx(found.raw.std, rel=1e-6)
    assert again.present == pytest.approx(1.0, abs=1e-5)
    assert latent_stats(config, number=2).raw.std == found.raw.std


def test_the_hunyuan_vaes_factors_are_its_own(tmp_path: Path) -> None:
    table = make_table(tmp_path, clips=2, frames=9)
    config = cache_config(table, **{**CAUSAL, "bucket_config": {"32px_ar2:1": {9: [1.0, 1]}}})
    found = latent_stats(config)
    assert set(found.factors) == {"scale_factor", "shift_factor"}
    scaled = config.model_copy(update={"ae": config.ae.model_copy(update=found.factors)})
    again = latent_stats(scaled)
    assert again.present == pytest.approx(1.0, abs=1e-5)
    parts = build_frozen_parts(scaled, torch.device("cpu"), torch.float32, text=False)
    from osora_cli.data.media import read_frames
    from osora_cli.data.transforms import resize_crop_uint8

    assert parts.ae is not None
    latents = []
    for i in range(2):
        frames = torch.from_numpy(read_frames(tmp_path / f"clip{i}.mp4", list(range(9)))).permute(0, 3, 1, 2)
        video = resize_crop_uint8(frames, (32, 32)).transpose(0, 1)[None]
        latents.append(encode_latents(parts.ae, normalize(video)))
    joined = torch.cat(latents).double()
    assert float(joined.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    assert float(joined.mean()) == pytest.approx(0.0, abs=1e-4)


def test_clips_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    config = cache_config(make_table(tmp_path, clips=3))
    (tmp_path / "clip1.mp4").write_bytes(b"no clip")
    found = latent_stats(config)
    assert found.clips == 2
    assert [path for path, _ in found.unreadable] == ["clip1.mp4"]
    for i in (0, 2):
        (tmp_path / f"clip{i}.mp4").write_bytes(b"no clip")
    with pytest.raises(DataError, match="none of 3 clips"):
        latent_stats(config)
    make_clip(tmp_path / "clip0.mp4", frames=8)
