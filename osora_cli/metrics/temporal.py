"""How far motion and stillness of a clip are kept: error of the differences between frames."""

from __future__ import annotations

import torch

from osora_cli.metrics.clips import as_pair


def frame_flicker(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference between the frame differences of `a` and those of `b`, one number a step in time.

    An error that stays the same from frame to frame (blur, a colour cast) costs nothing here; one that jumps does.

    Args:
        a, b: `[B, C, T, H, W]` or `[T, C, H, W]` float, same shape.

    Returns:
        `[B, T - 1]` float64, in units of the data range's own values.
    """
    a, b = as_pair(a, b)
    steps = []
    previous = a[:, :, 0].double() - b[:, :, 0].double()
    for t in range(1, a.shape[2]):
        error = a[:, :, t].double() - b[:, :, t].double()
        steps.append((error - previous).abs().mean((1, 2, 3)))
        previous = error
    return torch.stack(steps, dim=1) if steps else previous.new_empty((a.shape[0], 0))


def flicker(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean of `frame_flicker` over each clip, `[B]` float64; `nan` for clips of one frame (no differences)."""
    return frame_flicker(a, b).mean(dim=1)
