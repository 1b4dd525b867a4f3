from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.functional.image import structural_similarity_index_measure

from osora_cli.metrics.ssim import frame_ssim, ssim


def smooth_pair(seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Blurred noise and a disturbed copy of it: nearer to pictures than white noise is."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(shape, generator=generator)
    a = torch.nn.functional.avg_pool3d(a, (1, 5, 5), stride=1, padding=(0, 2, 2))
    return a, (a + 0.05 * torch.randn(shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("size", [(6, 6), (11, 11), (24, 17), (64, 96)])
@pytest.mark.parametrize("scale", [1.0, 2.0, 255.0])
def test_equal_to_torchmetrics_per_frame(size: tuple[int, int], scale: float) -> None:
    a, b = (x * scale for x in smooth_pair(0, (2, 3, 3, *size)))
    frames = frame_ssim(a, b, scale)
    for clip in range(2):
        # The map as a whole: what the mean leaves out at the edges has changed between versions of the oracle.
        _, oracle = structural_similarity_index_measure(
            b[clip].transpose(0, 1),
            a[clip].transpose(0, 1),
            data_range=scale,
            reduction="none",
            return_full_image=True,
        )
        torch.testing.assert_close(frames[clip], oracle.mean((1, 2, 3)).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(ssim(a, b, scale), frames.mean(1))


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_flat_frames_where_single_precision_cancels(level: float) -> None:
    a = torch.full((1, 3, 1, 32, 32), level)
    b = (a - 0.02).abs()
    first, second = (x[0].transpose(0, 1).double() for x in (a, b))
    _, oracle = structural_similarity_index_measure(second, first, data_range=1.0, return_full_image=True)
    assert ssim(a, b, 1.0).item() == pytest.approx(float(oracle.mean()), abs=1e-5)


def test_identical_clips_are_one_and_noise_is_less() -> None:
    a, b = smooth_pair(1, (1, 3, 2, 32, 32))
    assert ssim(a, a, 1.0).item() == pytest.approx(1.0, abs=1e-12)
    assert 0.1 < ssim(a, b, 1.0).item() < 0.99
    assert ssim(a, b, 1.0).item() == pytest.approx(ssim(b, a, 1.0).item(), abs=1e-12)


def test_tchw_is_one_clip() -> None:
    a, b = smooth_pair(2, (1, 3, 4, 16, 20))
    assert torch.equal(ssim(a[0].transpose(0, 1), b[0].transpose(0, 1), 1.0), ssim(a, b, 1.0))


def test_frames_that_the_window_does_not_fit_have_no_ssim() -> None:
    a = torch.rand(2, 3, 4, 5, 64)
    got = ssim(a, a, 1.0)
    assert got.shape == (2,)
    assert all(math.isnan(x) for x in got.tolist())


def test_wrong_inputs_are_refused() -> None:
    a = torch.rand(1, 3, 2, 16, 16)
    with pytest.raises(ValueError, match="data range"):
        ssim(a, a, -1.0)
    with pytest.raises(ValueError, match="differ in shape"):
        ssim(a, a[..., :12], 1.0)
