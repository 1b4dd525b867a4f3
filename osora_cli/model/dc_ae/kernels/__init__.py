"""Triton kernels of the Video DC-AE for CUDA: each does in one pass over memory what the plain form does in several.

`ops.py` and `blocks.py` choose between these and the plain form, which gives the same numbers up to rounding. All take
[B, C, T, H, W] in channels_last_3d (others are brought there), accumulate in fp32 and use no atomics, so that the same
input gives the same bits.

Triton is imported with the modules of this folder, inside the functions that use them, since it takes a while.
OSORA_KERNELS=0 in the environment keeps to the plain form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_planning = False


def usable(x: Tensor) -> bool:
    """Whether the kernels take x: on CUDA (or on the meta device within `planning`), in fp32, bf16 or fp16."""
    return x.dtype in _DTYPES and ((x.is_cuda and available()) or (x.is_meta and _planning))


@contextmanager
def planning() -> Iterator[None]:
    """Within it the meta device takes the way of CUDA, so that the memory traced is what CUDA will take."""
    global _planning
    before, _planning = _planning, True
    try:
        yield
    finally:
        _planning = before


@cache
def available() -> bool:
    """Whether Triton is installed and OSORA_KERNELS is not `0`."""
    return os.environ.get("OSORA_KERNELS") != "0" and find_spec("triton") is not None
