"""Kernels that repeat: what torch is told, without a GPU. What it makes of it: tests/gpu/test_diffusion.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from osora_cli.engine.cuda import begin_on, strictly_deterministic


def state() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled, warns = state()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


def test_backward_is_strict_only_where_deterministic_kernels_are_asked_for() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(state()))
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled, warn_only=True)
        before = state()
        with strictly_deterministic():
            (2 * x).sum().backward()
        assert state() == before
        with pytest.raises(ZeroDivisionError), strictly_deterministic():
            raise ZeroDivisionError
        assert state() == before
    assert seen[1] == (True, False)
    assert seen[0][0] is False


def test_the_cpu_repeats_as_it_is() -> None:
    begin_on(torch.device("cpu"), deterministic=True)
    assert state() == (False, False)
