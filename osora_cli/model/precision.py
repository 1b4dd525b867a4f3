"""Autocast that also works where there are shapes only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(kind: str, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[object]:
    """torch.autocast for a device's kind. The meta device has none: there nothing is changed."""
    if kind == "meta":
        return nullcontext()
    return torch.autocast(kind, dtype=dtype, enabled=enabled)
