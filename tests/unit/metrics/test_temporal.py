from __future__ import annotations

import math

import pytest
import torch

from osora_cli.metrics.temporal import flicker, frame_flicker


def test_a_constant_error_does_not_flicker() -> None:
    a = torch.rand(2, 3, 6, 8, 8)
    assert flicker(a, a + 0.25).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_an_error_of_changing_sign_does() -> None:
    a = torch.rand(1, 3, 6, 8, 8)
    sign = torch.tensor([1.0, -1.0]).repeat(3).view(1, 1, 6, 1, 1)
    assert flicker(a, a + 0.1 * sign).item() == pytest.approx(0.2, abs=1e-6)


def test_equal_to_the_definition() -> None:
    a, b = torch.rand(2, 3, 5, 7, 9), torch.rand(2, 3, 5, 7, 9)
    direct = ((b.double().diff(dim=2) - a.double().diff(dim=2)).abs()).mean((1, 3, 4))
    torch.testing.assert_close(frame_flicker(a, b), direct, atol=1e-12, rtol=0)
    torch.testing.assert_close(flicker(a, b), direct.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(flicker(a[0].transpose(0, 1), b[0].transpose(0, 1)), direct[:1].mean(1))


def test_a_still_has_none() -> None:
    a = torch.rand(1, 3, 1, 8, 8)
    assert frame_flicker(a, a).shape == (1, 0)
    assert math.isnan(flicker(a, a).item())
