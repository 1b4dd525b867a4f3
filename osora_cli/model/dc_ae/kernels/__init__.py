"""Triton kernels of the Video DC-AE for CUDA: each does in one pass over memory what the plain form does in several.

`ops.py` and `blocks.py` choose between these and the plain form, which gives the same numbers up to rounding. All take
[B, C, T, H, W] in channels_last_3d (others are brought there), accumulate in fp32 and use no atomics, so that the same
input gives the same bits.

Triton is imported when a kernel is first asked for, so that a machine without it can import this. OSORA_KERNELS=0 in
the environment keeps to the plain form.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor) -> bool:
    """Whether the kernels take x: on CUDA, in fp32, bf16 or fp16."""
    return x.is_cuda and x.dtype in _DTYPES and available()


@cache
def available() -> bool:
    """Whether Triton is installed and OSORA_KERNELS is not `0`."""
    return os.environ.get("OSORA_KERNELS") != "0" and find_spec("triton") is not None


@cache
def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def depthwise() -> Any:
    """The module of depthwise convolution."""
    return _module("depthwise")


def norm() -> Any:
    """The module of RMSNorm."""
    return _module("norm")


def activation() -> Any:
    """The module of SiLU with a bias, and of the gate."""
    return _module("activation")


def attention() -> Any:
    """The module of linear attention."""
    return _module("attention")


def grouped() -> Any:
    """The module of grouped pointwise convolution."""
    return _module("grouped")
