"""LPIPS of one chunk of frames and its gradient, as plain functions of tensors.

VGG16 is frozen and its gradient is wanted at one of its inputs only, so the way back is written out: no weight
gradients, no graph, and each activation goes as soon as it has been used. A distance and its gradient at the features
come from one pass over them. Nothing here depends on state, so `torch.compile` takes `distance_and_gradient` whole and
makes bias, ReLU, pooling and distance a few kernels.

Shapes: n frames, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

# (weight, bias) of a 3x3 convolution; a ReLU follows each.
Layer = tuple[Tensor, Tensor]
# The layers up to each tap. A 2x2 max pool stands between two slices.
Slices = Sequence[Sequence[Layer]]

NORM_EPS = 1e-10
# Under the root, so that an all-zero feature vector has a gradient (0) and not NaN.
ROOT_EPS = 1e-20


def taps(x_nCHW: Tensor, slices: Slices) -> list[Tensor]:
    """Features at the end of each slice. Call without gradient."""
    out = []
    for number, layers in enumerate(slices):
        if number:
            x_nCHW = F.max_pool2d(x_nCHW, 2)
        for weight, bias in layers:
            x_nCHW = F.conv2d(x_nCHW, weight, bias, padding=1).relu_()
        out.append(x_nCHW)
    return out


def tap_distance(target_nCHW: Tensor, recon_nCHW: Tensor, weight_C: Tensor) -> Tensor:
    """Weighted squared difference of channel-normalised features, mean over space: [n], fp32."""
    difference_nCHW = _unit(target_nCHW)[0].sub_(_unit(recon_nCHW)[0])
    return difference_nCHW.square_().mul_(weight_C.view(1, -1, 1, 1)).sum(dim=1).mean(dim=(1, 2))


def tap_distance_and_gradient(target_nCHW: Tensor, recon_nCHW: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """`tap_distance`, and the gradient of its sum over frames at `recon_nCHW`, in the dtype of that."""
    unit_nCHW, root_n1HW, norm_n1HW = _unit(recon_nCHW)
    difference_nCHW = _unit(target_nCHW)[0].sub_(unit_nCHW)
    # The gradient at the unit vector is -2 / (H*W) times this.
    slope_nCHW = difference_nCHW * weight_C.view(1, -1, 1, 1)
    distance_n = difference_nCHW.mul_(slope_nCHW).sum(dim=1).mean(dim=(1, 2))
    del difference_nCHW
    # u = x / (r + eps), r = |x|: what of the slope lies along u would change the length alone, which u does not have.
    along_n1HW = (slope_nCHW * unit_nCHW).sum(dim=1, keepdim=True) * (norm_n1HW / root_n1HW)
    scale_n1HW = -2.0 / (recon_nCHW.shape[2] * recon_nCHW.shape[3]) / norm_n1HW
    gradient_nCHW = slope_nCHW.sub_(unit_nCHW.mul_(along_n1HW)).mul_(scale_n1HW)
    return distance_n, gradient_nCHW.to(recon_nCHW.dtype)


def _unit(features_nCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Feature vectors at unit length over the channels, in fp32; their length and what they were divided by."""
    root_n1HW = (features_nCHW.float().square().sum(dim=1, keepdim=True) + ROOT_EPS).sqrt()
    norm_n1HW = root_n1HW + NORM_EPS
    return features_nCHW / norm_n1HW, root_n1HW, norm_n1HW


def distances(target_nCHW: Tensor, recon_nCHW: Tensor, slices: Slices, heads: Sequence[Tensor]) -> Tensor:
    """Each tap's share of each frame's distance, [n, taps], fp32. Call without gradient.

    Args:
        target_nCHW, recon_nCHW: frames as the first convolution takes them.
        heads: weights of each tap's channels, fp32.
    """
    pairs = zip(taps(target_nCHW, slices), taps(recon_nCHW, slices), heads, strict=True)
    return torch.stack([tap_distance(a, b, head) for a, b, head in pairs], dim=1)


def distance_and_gradient(
    target_nCHW: Tensor, recon_nCHW: Tensor, slices: Slices, heads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Distance of each frame, [n] in fp32, and the gradient of their sum at `recon_nCHW`. Call without gradient.

    Arguments as in `distances`.
    """
    target_taps = taps(target_nCHW, slices)
    outputs: list[list[Tensor]] = []  # of each layer; what a ReLU let through is where its output is not 0
    places: list[Tensor] = []  # where a pool took its values from
    x_nCHW = recon_nCHW
    for number, layers in enumerate(slices):
        if number:
            x_nCHW, where = F.max_pool2d_with_indices(x_nCHW, [2, 2])
            places.append(where)
        outputs.append([])
        for weight, bias in layers:
            x_nCHW = F.conv2d(x_nCHW, weight, bias, padding=1).relu_()
            outputs[-1].append(x_nCHW)

    distance_n = torch.zeros(len(recon_nCHW), device=recon_nCHW.device)
    gradient_nCHW: Tensor | None = None
    for layers, head in zip(reversed(slices), reversed(heads), strict=True):
        tap_nCHW, of_slice = outputs[-1][-1], outputs.pop()
        share_n, at_tap_nCHW = tap_distance_and_gradient(target_taps.pop(), tap_nCHW, head)
        distance_n = distance_n + share_n
        if gradient_nCHW is not None:
            at_tap_nCHW = at_tap_nCHW + _through_pool(gradient_nCHW, tap_nCHW, places.pop())
        del tap_nCHW
        gradient_nCHW = _through_layers(at_tap_nCHW, layers, of_slice)
    assert gradient_nCHW is not None
    return distance_n, gradient_nCHW


def _through_pool(gradient_nCHW: Tensor, input_nCHW: Tensor, where: Tensor) -> Tensor:
    back = torch.ops.aten.max_pool2d_with_indices_backward
    out: Tensor = back(gradient_nCHW, input_nCHW, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
    return out


def _through_layers(gradient_nCHW: Tensor, layers: Sequence[Layer], outputs: list[Tensor]) -> Tensor:
    """From a gradient at the output of a slice's last ReLU to one at the input of its first convolution."""
    for weight, _ in reversed(layers):
        gradient_nCHW = torch.ops.aten.threshold_backward(gradient_nCHW, outputs.pop(), 0)
        shape = [gradient_nCHW.shape[0], weight.shape[1], *gradient_nCHW.shape[2:]]
        gradient_nCHW = conv2d_input(shape, weight, gradient_nCHW, padding=1)
    return gradient_nCHW
