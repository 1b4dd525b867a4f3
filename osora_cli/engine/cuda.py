"""How a GPU is set up for a training, and kernels that give the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def begin_on(device: torch.device, *, deterministic: bool) -> None:
    """Take this GPU for the process; with `deterministic`, kernels that repeat, where torch has them.

    Nothing on another kind of device. Before the first matrix product: cuBLAS reads how much workspace it may have,
    and with that whether its sums have an order, only once.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    # Trying out algorithms costs half a minute for each new shape and gains 1 % (DC-AE, H200).
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Inside, where deterministic kernels are asked for, one that cannot be had is an error and not a warning.

    Flash attention's backward adds up in a fixed order only then: where a warning would do, it warns and goes on in
    whatever order its blocks end.
    """
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    if warns:
        torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        if warns:
            torch.use_deterministic_algorithms(True, warn_only=True)
