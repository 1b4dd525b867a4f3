"""nn.Conv3d without a fault of the CPU's bf16 kernels, and quick for a batch of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.model.precision import autocast_dtype

# torch hands an fp32 convolution of one clip to oneDNN only where channels x frames x rows are above this
# (use_mkldnn in ATen/native/Convolution.cpp); below, its own kernel takes 2 to 10 times as
# long. Batches of two and more always go to oneDNN.
_ALONE = 20480


class Conv3d(nn.Conv3d):
    """nn.Conv3d, right also for very short clips in bf16 on the CPU, and quick there for one clip at a time.

    There oneDNN's kernel for the weight's gradient (jit_bf16, seen with torch 2.13) leaves memory unset when a clip
    that is padded in time has more than one frame but fewer than the kernel has taps. Such a clip gets frames of zeros
    up to the kernel's length, which stand where the padding stood; the outputs they add are cut off.

    Where no gradient is asked for, a small fp32 batch of one goes to oneDNN as larger ones do.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(input)
        if self._is_slow_alone(input):
            return torch.mkldnn_convolution(
                input, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
            )
        frames, taps, padding = input.shape[2], self.kernel_size[0], self.padding[0]
        if not (padding and 1 < frames < taps and self.dilation[0] == 1 and autocast_dtype(input) == torch.bfloat16):
            return super().forward(input)
        outputs = (frames + 2 * padding - taps) // self.stride[0] + 1
        return super().forward(F.pad(input, (0, 0, 0, 0, 0, taps - frames)))[:, :, :outputs]

    def _is_slow_alone(self, input: Tensor) -> bool:
        _, channels, frames, rows, _ = input.shape
        plain = autocast_dtype(input) == input.dtype == self.weight.dtype == torch.float32
        small = len(input) == 1 and channels * frames * rows <= _ALONE
        return plain and small and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available()
