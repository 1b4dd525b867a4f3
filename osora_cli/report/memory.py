"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 2**30


def peak_memory_gib() -> float:
    """Most memory used so far, GiB: of the current GPU where one is in use, else resident memory of the process.

    Asks counters only; nothing waits for the device.
    """
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):  # 0: not in use, and stays so
        return allocated / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
