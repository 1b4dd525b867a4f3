"""Tensors that are spread over ranks, put together and compared."""

from __future__ import annotations

import torch
from torch import Tensor


def assembled(parts: list[list[tuple[str, int, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors, flat, from what the ranks hold; replicas must agree."""
    found: dict[str, dict[int, Tensor]] = {}
    for rank in parts:
        for key, start, tensor in rank:
            held = found.setdefault(key, {})
            if start in held and tensor.numel() and held[start].numel():
                assert torch.equal(held[start], tensor), f"the ranks hold different values of `{key}`"
            if tensor.numel() or start not in held:
                held[start] = tensor
    return {key: torch.cat([held[start] for start in sorted(held)]) for key, held in found.items()}


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """All tensors together within `relative`; each, where sums of both signs cancel, within ten times that."""
    assert got.keys() == expected.keys()
    errors = {key: float((got[key].float() - value.float()).norm()) for key, value in expected.items()}
    norms = {key: float(value.float().norm()) for key, value in expected.items()}
    assert sum(e * e for e in errors.values()) ** 0.5 <= relative * sum(n * n for n in norms.values()) ** 0.5
    assert {key: e for key, e in errors.items() if e > 10 * relative * norms[key] + 1e-9} == {}
