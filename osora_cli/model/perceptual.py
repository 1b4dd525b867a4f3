"""LPIPS with VGG16: distance of frames as people see it (Zhang et al. 2018, "The Unreasonable
Effectiveness of Deep Features as a Perceptual Metric", equation 1, with the network of Simonyan and Zisserman 2015).

Shapes: N frames, C channels, H rows, W columns, L the five taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from osora_cli.model.conv import has_bf16
from osora_cli.model.perceptual_chunk import Layer, distance_and_gradient, distances
from osora_cli.model.precision import autocast

SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
# VGG16's `features`: output channels of a convolution (each with its ReLU), or M for a 2x2 max pool.
VGG16_LAYERS: tuple[int | str, ...] = (
    64,
    64,
    "M",
    128,
    128,
    "M",
    256,
    256,
    256,
    "M",
    512,
    512,
    512,
    "M",
    512,
    512,
    512,
)
SLICE_ENDS = (4, 9, 16, 23, 30)
TAP_CHANNELS = (64, 128, 256, 512, 512)
MIN_SIZE = 16
# What a chunk takes at the most, and what a pixel of it takes by the convolutions' dtype, in bytes.
CHUNK_BYTES = 2**31
PIXEL_BYTES = {torch.float32: 1900, torch.bfloat16: 1420}


class _Scaling(nn.Module):
    """The constants that bring [-1, 1] to the statistics VGG16 was trained on."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1))

    def forward(self, frames_NCHW: Tensor) -> Tensor:
        return (frames_NCHW - self.shift) / self.scale


class _Vgg16(nn.Module):
    """VGG16's convolutions in five slices, each ending at a tap. Children keep their index in `features`."""

    def __init__(self) -> None:
        super().__init__()
        slices = [nn.Sequential() for _ in SLICE_ENDS]
        index, channels = 0, 3

        def add(layer: nn.Module) -> None:
            nonlocal index
            number = next(n for n, end in enumerate(SLICE_ENDS) if index < end)
            slices[number].add_module(str(index), layer)
            index += 1

        for width in VGG16_LAYERS:
            if isinstance(width, str):
                add(nn.MaxPool2d(2, 2))
                continue
            add(nn.Conv2d(channels, width, 3, padding=1))
            add(nn.ReLU(inplace=True))
            channels = width
        self.slice1, self.slice2, self.slice3, self.slice4, self.slice5 = slices

    def forward(self, x_NCHW: Tensor) -> list[Tensor]:
        taps = []
        for part in (self.slice1, self.slice2, self.slice3, self.slice4, self.slice5):
            x_NCHW = part(x_NCHW)
            taps.append(x_NCHW)
        return taps


class _Head(nn.Module):
    """Weights of a tap's channels. The dropout is never active; it gives the convolution its key `model.1`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Dropout(), nn.Conv2d(channels, 1, 1, bias=False))

    @property
    def weight(self) -> Tensor:
        return self.model[1].weight.flatten()  # type: ignore[operator]


class LPIPS(nn.Module):
    """Perceptual distance of frames: per tap the squared difference of channel-normalised features, weighted and
    averaged over space, summed over taps.

    Weights are frozen and the module is always in evaluation mode. Frames are taken in chunks. Where a gradient is
    needed, each chunk is passed backward at once, for a frame's distance depends on that frame alone: no activation
    outlives its chunk, nothing is recomputed, and the target's features are computed once, without gradient.

    Args:
        compute_dtype: precision of the convolutions; weights, norms and sums are fp32 in any case.
        chunk_pixels: frames of a chunk times H*W at most (a single frame always fits). None: what takes about
            `CHUNK_BYTES`.
    """

    def __init__(self, *, compute_dtype: torch.dtype = torch.float32, chunk_pixels: int | None = None) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.chunk_pixels = chunk_pixels or CHUNK_BYTES // PIXEL_BYTES.get(compute_dtype, max(PIXEL_BYTES.values()))
        self._distance_and_gradient: Callable[..., tuple[Tensor, Tensor]] = distance_and_gradient
        self.scaling_layer = _Scaling()
        self.net = _Vgg16()
        self.lin0, self.lin1, self.lin2, self.lin3, self.lin4 = (_Head(c) for c in TAP_CHANNELS)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> LPIPS:
        """Stays in evaluation mode whatever is asked: the heads' dropout must not run."""
        return super().train(False)

    def compile(self, **options: Any) -> None:
        """Compile what a training step takes, distance and gradient of a chunk, with options of `torch.compile`."""
        self._distance_and_gradient = torch.compile(distance_and_gradient, **options)

    def forward(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> Tensor:
        """Distance of each frame [N, 1, 1, 1], fp32, from two batches of frames [N, 3, H, W] in [-1, 1].

        The gradient goes to `recon_NCHW` only, once.

        Raises:
            ValueError: shapes differ, not three channels, or frames below 16 px on a side.
        """
        self._check(target_NCHW, recon_NCHW)
        if torch.is_grad_enabled() and recon_NCHW.requires_grad:
            distance: Tensor = _Chunkwise.apply(recon_NCHW, target_NCHW.detach(), self)  # type: ignore[no-untyped-call]
            return distance
        return self.per_tap(target_NCHW, recon_NCHW).sum(dim=1).view(-1, 1, 1, 1)

    @torch.no_grad()
    def per_tap(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> Tensor:
        """The five taps' shares of each frame's distance, [N, 5], fp32, without gradient."""
        self._check(target_NCHW, recon_NCHW)
        slices, heads = self._slices(), self._heads()
        with autocast(recon_NCHW.device.type, enabled=False):
            return torch.cat([
                distances(self._frames(a), self._frames(b), slices, heads)
                for a, b in self._chunks(target_NCHW, recon_NCHW)
            ])  # fmt: skip

    @torch.no_grad()
    def with_gradient(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Distance of each frame [N], and the gradient of their sum at `recon_NCHW`; both fp32."""
        slices, heads = self._slices(), self._heads()
        values, gradients = [], []
        # The caller's autocast is off, so that the precision is the one asked for.
        with autocast(recon_NCHW.device.type, enabled=False):
            for a, b in self._chunks(target_NCHW, recon_NCHW):
                distance_n, gradient_nCHW = self._distance_and_gradient(
                    self._frames(a), self._frames(b), slices, heads
                )  # fmt: skip
                values.append(distance_n)
                gradients.append(gradient_nCHW.float() / self.scaling_layer.scale)
        return torch.cat(values), torch.cat(gradients)

    def _check(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> None:
        if target_NCHW.shape != recon_NCHW.shape:
            raise ValueError(f"the reconstruction is {list(recon_NCHW.shape)}, the target {list(target_NCHW.shape)}")
        _, channels, height, width = recon_NCHW.shape
        if channels != 3 or min(height, width) < MIN_SIZE:
            raise ValueError(f"LPIPS takes frames [N, 3, H, W] of at least {MIN_SIZE} px, not {list(recon_NCHW.shape)}")

    def _chunks(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal chunks, but for one frame: a small last one would leave a GPU half idle."""
        frames, _, height, width = recon_NCHW.shape
        most = max(1, self.chunk_pixels // (height * width))
        count = max(1, -(-frames // most))
        return zip(target_NCHW.tensor_split(count), recon_NCHW.tensor_split(count), strict=True)

    def _frames(self, frames_NCHW: Tensor) -> Tensor:
        """Frames as VGG16 was trained on them, scaled in fp32, in the convolutions' dtype."""
        return self._laid_out(self.scaling_layer(frames_NCHW.float()))

    def _laid_out(self, x: Tensor) -> Tensor:
        """In the convolutions' dtype; on a GPU in the layout that tensor cores take without a transpose."""
        layout = torch.channels_last if x.is_cuda and x.dim() == 4 else torch.contiguous_format
        slow = self.compute_dtype == torch.bfloat16 and x.device.type == "cpu" and not has_bf16()
        return x.to(torch.float32 if slow else self.compute_dtype).contiguous(memory_format=layout)

    def _slices(self) -> list[list[Layer]]:
        """Weights of the convolutions as they are taken, cast once a call."""
        convolutions = [[m for m in part.modules() if isinstance(m, nn.Conv2d)] for part in self.net.children()]
        return [
            [(self._laid_out(c.weight), self._laid_out(c.bias)) for c in part if c.bias is not None]
            for part in convolutions
        ]

    def _heads(self) -> list[Tensor]:
        return [head.weight.float() for head in (self.lin0, self.lin1, self.lin2, self.lin3, self.lin4)]


class _Chunkwise(torch.autograd.Function):
    """LPIPS whose gradient at the reconstruction is worked out in the forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, recon_NCHW: Tensor, target_NCHW: Tensor, net: LPIPS) -> Tensor:
        distance_N, gradient_NCHW = net.with_gradient(target_NCHW, recon_NCHW)
        ctx.save_for_backward(gradient_NCHW)
        ctx.dtype = recon_NCHW.dtype
        return distance_N.view(-1, 1, 1, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N111: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NCHW,) = ctx.saved_tensors
        return (gradient_NCHW * grad_N111).to(ctx.dtype), None, None
