"""nn.Conv3d without a fault of the CPU's bf16 kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run a convolution of x: x's own where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Conv3d(nn.Conv3d):
    """nn.Conv3d, right also for very short clips in bf16 on the CPU.

    There oneDNN's kernel for the weight's gradient (jit_bf16, seen with torch 2.13) leaves memory unset when a clip
    that is padded in time has more than one frame but fewer than the kernel has taps. Such a clip gets frames of zeros
    up to the kernel's length, which stand where the padding stood; the outputs they add are cut off.
    """

    def forward(self, input: Tensor) -> Tensor:
        frames, taps = input.shape[2], self.kernel_size[0]
        padding = 0 if isinstance(self.padding, str) else self.padding[0]
        if not (padding and 1 < frames < taps and self.dilation[0] == 1 and self.padding_mode == "zeros"):
            return super().forward(input)
        if input.device.type != "cpu" or autocast_dtype(input) != torch.bfloat16:
            return super().forward(input)
        outputs = (frames + 2 * padding - taps) // self.stride[0] + 1
        return super().forward(F.pad(input, (0, 0, 0, 0, 0, taps - frames)))[:, :, :outputs]
