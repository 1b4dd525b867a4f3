"""Triton kernels of the Video DC-AE for CUDA: each does in one pass over memory what the plain form does in several.

`ops.py` and `blocks.py` choose between these and the plain form, which gives the same numbers up to rounding. All take
[B, C, T, H, W] in channels_last_3d (others are brought there), accumulate in fp32 and use no atomics, so that the same
input gives the same bits.

Triton is imported with the modules of this folder, inside the functions that use them, since it takes a while.
OSORA_KERNELS=0 in the environment keeps to the plain form.
"""

from __future__ import annotations

import os
import warnings
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
    """Whether the kernels run on this machine's GPU; where they do not, it is said once, with the reason."""
    if os.environ.get("OSORA_KERNELS") == "0":
        return False
    fault = fault_here()
    if fault is not None:
        warnings.warn(f"the DC-AE's Triton kernels do not run here, training is slower: {fault}", stacklevel=2)
    return fault is None


@cache
def fault_here() -> str | None:
    """Why no kernel can be run on the GPU; None where one has run."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from osora_cli.model.dc_ae.kernels import activation

        activation.silu_gate(torch.zeros(1, 32, 1, 1, 1, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # a compiler that is missing, a driver or a GPU that Triton does not know
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
