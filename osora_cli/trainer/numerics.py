"""How the processor computes, and whence it takes memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """Inside, numbers below 1.2e-38 are 0 on the CPU, in this thread and those it starts.

    Moments of an optimizer and gradients of a trained network decay into that range, and there a processor takes many
    times as long for an operation. A loss does not feel the difference; a resume is exact, for it computes in the same
    way. Afterwards this thread computes as it is usual.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def keep_freed_memory() -> None:
    """Freed buffers stay with this process, on Linux with glibc; for trainings on the CPU.

    Each update makes and frees the same activations. Given back to the system they come again as pages of zeros, tens
    of thousands of page faults an update: 7 to 18 % of its time (tests/benchmarks/cpu_update.py).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
