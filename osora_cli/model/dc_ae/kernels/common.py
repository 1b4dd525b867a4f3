"""The layout that the kernels read, and their launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def channels_last(x_BCTHW: Tensor) -> Tensor:
    """x with a pixel's channels side by side; x itself where it is so already."""
    return x_BCTHW.contiguous(memory_format=torch.channels_last_3d)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Run a kernel over a grid of programs; nothing on the meta device, where there are shapes only."""
    if not arguments[0].is_meta:
        kernel[grid](*arguments, **sizes)
