"""Autocast that also works where there are shapes only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(kind: str, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[object]:
    """torch.autocast for a device's kind. The meta device has none: there nothing is changed."""
    if kind == "meta":
        return nullcontext()
    return torch.autocast(kind, dtype=dtype, enabled=enabled)


def autocast_is_on(kind: str) -> bool:
    """Whether autocast is on for a device's kind; never on the meta device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which autocast would run a convolution of x: x's own where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocast_is_on(kind) else x.dtype
