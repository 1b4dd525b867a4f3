"""nn.Conv3d without a fault of the CPU's bf16 kernels, and quick for a batch of one."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.model.precision import autocast, autocast_dtype

# torch hands an fp32 convolution of one clip to oneDNN only where channels x frames x rows are above this
# (use_mkldnn in ATen/native/Convolution.cpp); below, its own kernel takes 2 to 10 times as
# long. Batches of two and more always go to oneDNN.
_ALONE = 20480


@cache
def has_bf16() -> bool:
    """Whether this processor has bf16 convolutions: without AVX-512 oneDNN takes its reference, 20 times as slow."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def in_fp32(input: Tensor) -> bool:
    """Whether a convolution in bf16 is computed in fp32 here."""
    return input.device.type == "cpu" and autocast_dtype(input) == torch.bfloat16 and not has_bf16()


class Conv3d(nn.Conv3d):
    """nn.Conv3d, right also for very short clips in bf16 on the CPU, and quick there for one clip at a time.

    There oneDNN's kernel for the weight's gradient (jit_bf16, seen with torch 2.13) leaves memory unset when a clip
    that is padded in time has more than one frame but fewer than the kernel has taps. Such a clip gets frames of zeros
    up to the kernel's length, which stand where the padding stood; the outputs they add are cut off.

    A processor without bf16 convolutions computes them in fp32, of the same values.

    Where no gradient is asked for, a small fp32 batch of one goes to oneDNN as larger ones do.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(input)
        if in_fp32(input):
            return self._in_fp32(input)
        if self._is_slow_alone(input):
            return torch.mkldnn_convolution(
                input, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
            )
        frames, taps, padding = input.shape[2], self.kernel_size[0], self.padding[0]
        if not (padding and 1 < frames < taps and self.dilation[0] == 1 and autocast_dtype(input) == torch.bfloat16):
            return super().forward(input)
        outputs = (frames + 2 * padding - taps) // self.stride[0] + 1
        return super().forward(F.pad(input, (0, 0, 0, 0, 0, taps - frames)))[:, :, :outputs]

    def _in_fp32(self, input: Tensor) -> Tensor:
        """Of the same bf16 values, rounded to bf16 once."""
        bias = None if self.bias is None else self.bias.bfloat16().float()
        with autocast("cpu", enabled=False):
            return self._conv_forward(input.bfloat16().float(), self.weight.bfloat16().float(), bias).bfloat16()

    def _is_slow_alone(self, input: Tensor) -> bool:
        _, channels, frames, rows, _ = input.shape
        plain = autocast_dtype(input) == input.dtype == self.weight.dtype == torch.float32
        small = len(input) == 1 and channels * frames * rows <= _ALONE
        return plain and small and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available()
