"""Recomputed blocks whose inputs wait in host memory: the same gradients, within the buffer's bounds."""

from __future__ import annotations

import pytest
import torch
from support.mmdit import inputs_for, small_model
from torch import Tensor

from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.host_buffer import HostBuffer


def gradients(model: MMDiT, tokens: tuple[int, int, int] = (2, 3, 5)) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs_for(model.config, tokens)).square().mean().backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capacity", [0, 20_000, 10**8])
def test_gradients_are_those_without_a_buffer(capacity: int) -> None:
    model = small_model(cond_embed=True)
    want = gradients(model)
    buffer = HostBuffer(capacity)
    model.enable_grad_checkpoint(True, buffer)
    for _ in range(2):  # the second step finds its places made
        got = gradients(model)
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert buffer.used <= capacity
    assert (buffer.used > 0) == (capacity > 0)


def test_places_are_used_again_and_make_room_for_other_sizes() -> None:
    model = small_model()
    roomy = HostBuffer(10**8)
    model.enable_grad_checkpoint(True, roomy)
    gradients(model)
    needed = roomy.used
    gradients(model)
    assert roomy.used == needed
    tight = HostBuffer(needed)
    model.enable_grad_checkpoint(True, tight)
    gradients(model)
    assert tight.used == needed
    want = gradients(small_model(), (1, 3, 3))
    got = gradients(model, (1, 3, 3))
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert tight.used <= needed


def test_evaluation_keeps_nothing() -> None:
    model, buffer = small_model(), HostBuffer(10**8)
    model.enable_grad_checkpoint(True, buffer)
    with torch.no_grad():
        model(**inputs_for(model.config))
    assert buffer.used == 0
