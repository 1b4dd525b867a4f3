"""How the processor computes."""

from __future__ import annotations

import torch


def flush_subnormals() -> None:
    """Take numbers below 1.2e-38 for 0 on the CPU, in this thread and those it starts from now on.

    Moments of an optimizer and gradients of a trained network decay into that range, and there a processor takes many
    times as long for an operation. A loss does not feel the difference; a resume is exact, for it computes in the same
    way.
    """
    torch.set_flush_denormal(True)
