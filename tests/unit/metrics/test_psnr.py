from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.functional.image import peak_signal_noise_ratio

from osora_cli.metrics.psnr import frame_mse, psnr, psnr_from_mse


def pair(seed: int, shape: tuple[int, ...], noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(shape, generator=generator)
    b = (a + noise * torch.randn(shape, generator=generator)).clamp(0, 1)
    return a, b


@pytest.mark.parametrize("scale", [1.0, 2.0, 255.0])
def test_equal_to_torchmetrics_per_clip(scale: float) -> None:
    a, b = (x * scale for x in pair(0, (3, 3, 5, 24, 17)))
    oracle = torch.stack([peak_signal_noise_ratio(b[i], a[i], data_range=scale) for i in range(3)])
    torch.testing.assert_close(psnr(a, b, scale), oracle.double(), atol=1e-5, rtol=0)


def test_a_known_error_gives_the_known_number() -> None:
    a = torch.zeros(1, 3, 2, 8, 8)
    assert psnr(a, a + 0.1, 1.0).item() == pytest.approx(20.0, abs=1e-5)
    assert psnr(a, a + 0.1, 2.0).item() == pytest.approx(20.0 + 20 * math.log10(2), abs=1e-5)


def test_clips_are_scored_one_by_one() -> None:
    a, b = pair(1, (2, 3, 4, 9, 9))
    b[1] = a[1]
    got = psnr(a, b, 1.0)
    assert got.shape == (2,)
    assert got[1].item() == math.inf
    assert got[0].item() == psnr(a[:1], b[:1], 1.0).item() < 30


def test_tchw_is_one_clip() -> None:
    a, b = pair(2, (1, 3, 4, 10, 12))
    as_frames = [x[0].permute(1, 0, 2, 3) for x in (a, b)]
    assert torch.equal(psnr(*as_frames, 1.0), psnr(a, b, 1.0))


def test_parts_of_a_clip_add_up_by_frames() -> None:
    a, b = pair(3, (1, 3, 7, 16, 16))
    parts = torch.cat([frame_mse(a[:, :, :3], b[:, :, :3]), frame_mse(a[:, :, 3:], b[:, :, 3:])], dim=1)
    assert psnr_from_mse(parts.mean(1), 1.0).item() == pytest.approx(psnr(a, b, 1.0).item(), abs=1e-12)


def test_nan_is_not_hidden() -> None:
    a, b = pair(4, (1, 3, 2, 8, 8))
    b[0, 0, 0, 0, 0] = math.nan
    assert math.isnan(psnr(a, b, 1.0).item())


def test_bf16_is_scored_in_float64() -> None:
    a, b = (x.bfloat16() for x in pair(5, (1, 3, 2, 16, 16)))
    assert torch.equal(psnr(a, b, 1.0), psnr(a.double(), b.double(), 1.0))


@pytest.mark.parametrize(
    ("a", "b", "data_range", "message"),
    [
        (torch.zeros(1, 3, 2, 8, 8), torch.zeros(1, 3, 2, 8, 4), 1.0, "differ in shape"),
        (torch.zeros(1, 3, 2, 8, 8, dtype=torch.uint8), torch.zeros(1, 3, 2, 8, 8, dtype=torch.uint8), 255.0, "float"),
        (torch.zeros(3, 8, 8), torch.zeros(3, 8, 8), 1.0, "expected"),
        (torch.zeros(1, 3, 0, 8, 8), torch.zeros(1, 3, 0, 8, 8), 1.0, "without elements"),
        (torch.zeros(1, 3, 2, 8, 8), torch.zeros(1, 3, 2, 8, 8), 0.0, "data range"),
        (torch.zeros(1, 3, 2, 8, 8), torch.zeros(1, 3, 2, 8, 8), math.nan, "data range"),
    ],
)
def test_wrong_inputs_are_refused(a: torch.Tensor, b: torch.Tensor, data_range: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        psnr(a, b, data_range)
