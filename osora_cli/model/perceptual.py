"""LPIPS with VGG16: distance of frames as people see it (models.md 4.2; Zhang et al. 2018, "The Unreasonable
Effectiveness of Deep Features as a Perceptual Metric", equation 1, with the network of Simonyan and Zisserman 2015).

Shapes: N frames, C channels, H rows, W columns, L the five taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
NORM_EPS = 1e-10
# Under the root, so that an all-zero feature vector has a gradient (0) and not NaN.
ROOT_EPS = 1e-20


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
        chunk_pixels: frames of a chunk times H*W at most (a single frame always fits). 2**19, eight frames of
            256x256, take about 1.8 GiB in fp32.
    """

    def __init__(self, *, compute_dtype: torch.dtype = torch.float32, chunk_pixels: int = 2**19) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.chunk_pixels = chunk_pixels
        self.scaling_layer = _Scaling()
        self.net = _Vgg16()
        self.lin0, self.lin1, self.lin2, self.lin3, self.lin4 = (_Head(c) for c in TAP_CHANNELS)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> LPIPS:
        """Stays in evaluation mode whatever is asked: the heads' dropout must not run."""
        return super().train(False)

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
        chunks = self._chunks(target_NCHW, recon_NCHW)
        return torch.cat([self._distances(self._features(a), b) for a, b in chunks])

    def _check(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> None:
        if target_NCHW.shape != recon_NCHW.shape:
            raise ValueError(f"the reconstruction is {list(recon_NCHW.shape)}, the target {list(target_NCHW.shape)}")
        _, channels, height, width = recon_NCHW.shape
        if channels != 3 or min(height, width) < MIN_SIZE:
            raise ValueError(f"LPIPS takes frames [N, 3, H, W] of at least {MIN_SIZE} px, not {list(recon_NCHW.shape)}")

    def _chunks(self, target_NCHW: Tensor, recon_NCHW: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = max(1, self.chunk_pixels // (recon_NCHW.shape[2] * recon_NCHW.shape[3]))
        return list(zip(torch.split(target_NCHW, size), torch.split(recon_NCHW, size), strict=True))

    def _features(self, frames_NCHW: Tensor) -> list[Tensor]:
        # Its own autocast, so that the precision is the one asked for and not the caller's.
        low = self.compute_dtype != torch.float32
        with autocast(frames_NCHW.device.type, dtype=self.compute_dtype if low else None, enabled=low):
            x_NCHW = self.scaling_layer(frames_NCHW.float())
            if x_NCHW.is_cuda:  # the layout that tensor cores take without a transpose
                x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
            return self.net(x_NCHW)

    def _distances(self, target_taps: list[Tensor], recon_NCHW: Tensor) -> Tensor:
        """[n, 5] from a chunk's target features and its reconstruction."""
        heads = (self.lin0, self.lin1, self.lin2, self.lin3, self.lin4)
        with autocast(recon_NCHW.device.type, enabled=False):
            shares = []
            for head, a_NCHW, b_NCHW in zip(heads, target_taps, self._features(recon_NCHW), strict=True):
                difference_NCHW = _unit(b_NCHW.float()) - _unit(a_NCHW.float())
                shares.append(difference_NCHW.square().mean(dim=(2, 3)) @ head.weight.float())
            return torch.stack(shares, dim=1)


def _unit(features_NCHW: Tensor) -> Tensor:
    """Feature vectors at unit length over the channels."""
    squares_NCHW = features_NCHW.square().sum(dim=1, keepdim=True)
    return features_NCHW / ((squares_NCHW + ROOT_EPS).sqrt() + NORM_EPS)


class _Chunkwise(torch.autograd.Function):
    """LPIPS whose gradient at the reconstruction is worked out in the forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, recon_NCHW: Tensor, target_NCHW: Tensor, net: LPIPS) -> Tensor:
        values, gradients = [], []
        for target, recon in net._chunks(target_NCHW, recon_NCHW.detach()):
            target_taps = net._features(target)
            with torch.enable_grad():
                leaf = recon.float().requires_grad_(True)
                distance_N = net._distances(target_taps, leaf).sum(dim=1)
                (gradient,) = torch.autograd.grad(distance_N.sum(), leaf)
            values.append(distance_N.detach())
            gradients.append(gradient)
        ctx.save_for_backward(torch.cat(gradients))
        ctx.dtype = recon_NCHW.dtype
        return torch.cat(values).view(-1, 1, 1, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N111: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NCHW,) = ctx.saved_tensors
        return (gradient_NCHW * grad_N111).to(ctx.dtype), None, None
