"""Triton where it is installed, the layout that the kernels read, and their launch.

Without Triton the kernels' modules can still be imported, and say on the meta device what would be allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:

    class triton:  # type: ignore[no-redef]
        """As much of Triton as the sizes of grids and buffers take."""

        @staticmethod
        def jit(function: Any) -> Any:
            return function

        @staticmethod
        def cdiv(total: int, part: int) -> int:
            return -(-total // part)

        @staticmethod
        def next_power_of_2(number: int) -> int:
            return 1 << (number - 1).bit_length()

    tl = None

__all__ = ["channels_last", "launch", "tl", "triton"]


def channels_last(x_BCTHW: Tensor) -> Tensor:
    """x with a pixel's channels side by side; x itself where it is so already."""
    return x_BCTHW.contiguous(memory_format=torch.channels_last_3d)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Run a kernel over a grid of programs; nothing on the meta device, where there are shapes only."""
    if not arguments[0].is_meta:
        kernel[grid](*arguments, **sizes)
