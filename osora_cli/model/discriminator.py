"""3-D patch discriminator with batch norm (Isola et al. 2017, section 3.2.2, in three dimensions).

Shapes: B batch, C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osora_cli.config.models.discriminator import DiscriminatorConfig
from osora_cli.errors import ConfigError
from osora_cli.model.conv import Conv3d

LEAKY_SLOPE = 0.2
INIT_STD = 0.02
MAX_WIDENING = 8


class BatchNorm3dFp32(nn.BatchNorm3d):
    """Batch norm whose running statistics stay in fp32 when the module is cast to a lower precision.

    In bf16 a running mean stops moving once a tenth of its distance to the batch's is below its rounding.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm3dFp32:
        before = {name: self._buffers[name] for name in ("running_mean", "running_var")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = self._buffers[name]
            if value is not None and moved is not None and moved.dtype in (torch.bfloat16, torch.float16):
                self._buffers[name] = value.to(device=moved.device)
        return self

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        # fp32 parameters go with activations of any precision, on the CPU and under cuDNN.
        weight, bias = self.weight.float(), self.bias.float()
        momentum = 0.0 if self.momentum is None else self.momentum
        return F.batch_norm(
            x_BCTHW, self.running_mean, self.running_var, weight, bias, self.training, momentum, self.eps
        )


class NLayerDiscriminator3D(nn.Module):
    """Clips to patch logits: strided convolutions, batch norm, leaky ReLU, dropout.

    Level 0 halves T, H and W, level 1 as well, later ones H and W only, each rounding up; then come one level and
    the logits at stride 1. A clip [B, C, T, H, W] in [-1, 1] gives [B, 1, T', H', W'], with H and W halved `n_layers`
    times. A single frame will do. Batch statistics and dropout are active in training, in each pass.
    """

    def __init__(self, config: DiscriminatorConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or DiscriminatorConfig()
        widths = [config.ndf * min(2**n, MAX_WIDENING) for n in range(config.n_layers + 1)]
        layers: list[nn.Module] = [_conv(config.input_nc, widths[0], stride=(2, 2, 2), bias=True), _leaky_relu()]
        for n in range(1, config.n_layers + 1):
            stride = (1, 1, 1) if n == config.n_layers else (2, 2, 2) if n == 1 else (1, 2, 2)
            layers += [
                _conv(widths[n - 1], widths[n], stride=stride, bias=False),
                BatchNorm3dFp32(widths[n]),
                _leaky_relu(),
                nn.Dropout(config.dropout),
            ]
        layers.append(_conv(widths[-1], 1, stride=(1, 1, 1), bias=True))
        self.main = nn.Sequential(*layers)
        self.apply(_init_weights)

    def reset_parameters(self, seed: int) -> None:
        """The initial values, each tensor drawn on the CPU in fp32 from a generator seeded by `seed` and its key.

        Convolutions N(0, 0.02), norms N(1, 0.02) and 0, biases of convolutions uniform to 1/sqrt(fan-in).
        """
        modules = dict(self.named_modules())
        with torch.no_grad():
            for key, value in self.named_parameters():
                owner, _, leaf = key.rpartition(".")
                module = modules[owner]
                # PyTorch's CPU generator looks at the low 32 bits of a seed only, so both go into them.
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
                drawn = torch.empty(value.shape, dtype=torch.float32)
                if leaf == "weight":
                    mean = 1.0 if isinstance(module, nn.BatchNorm3d) else 0.0
                    value.copy_(drawn.normal_(mean, INIT_STD, generator=generator))
                elif isinstance(module, nn.Conv3d):
                    bound = 1 / math.sqrt(module.weight[0].numel())
                    value.copy_(drawn.uniform_(-bound, bound, generator=generator))
                else:
                    value.zero_()
            for module in modules.values():
                if isinstance(module, nn.BatchNorm3d):
                    module.reset_running_stats()

    def logit_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the logits for a clip."""
        frames = _halve(frames, min(self.config.n_layers, 2))
        return frames, _halve(height, self.config.n_layers), _halve(width, self.config.n_layers)

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Logits [B, 1, T', H', W'].

        Raises:
            ConfigError: in training, a batch of one value a channel at the last level, which has no statistics.
        """
        batch, _, frames, height, width = video_BCTHW.shape
        if self.training and batch * torch.Size(self.logit_size(frames, height, width)).numel() < 2:
            raise ConfigError(
                f"one clip of `{frames}` frames of `{height}x{width}` px leaves the discriminator's batch norm "
                "one value a channel, which has no statistics",
                allowed=f"frames above {2**self.config.n_layers} px on a side, or several clips a batch",
                hint="take a larger size or batch in bucket_config, or a smaller `--discriminator.n_layers`",
            )
        return self.main(video_BCTHW)


def _conv(in_channels: int, out_channels: int, *, stride: tuple[int, int, int], bias: bool) -> nn.Conv3d:
    return Conv3d(in_channels, out_channels, 3, stride=stride, padding=1, bias=bias)


def _leaky_relu() -> nn.LeakyReLU:
    return nn.LeakyReLU(LEAKY_SLOPE, inplace=True)


def _halve(length: int, times: int) -> int:
    for _ in range(times):
        length = (length + 1) // 2
    return length


def _init_weights(module: nn.Module) -> None:
    """Normal draws: convolutions around 0, norms around 1. Biases of convolutions keep PyTorch's default."""
    if isinstance(module, nn.Conv3d):
        nn.init.normal_(module.weight, 0.0, INIT_STD)
    elif isinstance(module, nn.BatchNorm3d):
        nn.init.normal_(module.weight, 1.0, INIT_STD)
        nn.init.zeros_(module.bias)


def build_discriminator(config: DiscriminatorConfig | dict[str, Any]) -> NLayerDiscriminator3D:
    """The discriminator of a config, with its random initialisation."""
    return NLayerDiscriminator3D(DiscriminatorConfig.model_validate(config) if isinstance(config, dict) else config)
