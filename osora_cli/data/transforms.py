"""From decoded frames to the size of a bucket: resize to cover, then crop the centre.

Videos are resized bilinearly without antialiasing, stills bicubically with it (PIL), and the two round the crop's
corner differently: released models were trained that way. Rules: algorithms, part 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Size = tuple[int, int]


@contextmanager
def _one_thread() -> Iterator[None]:
    """With more, torch cuts the work differently and the last bit of a pixel depends on how: workers, which have one
    thread each, and a main process with several would not give the same pixels."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cover_size(source: Size, target: Size) -> Size:
    """The (height, width) that a `source` is resized to so that it just covers `target`."""
    height, width = source
    scale_h, scale_w = target[0] / height, target[1] / width
    if scale_h > scale_w:
        return target[0], round(width * scale_h)
    return round(height * scale_w), target[1]


def crop_corner(resized: Size, target: Size) -> tuple[int, int]:
    """Top left (row, column) of the centre crop of a video, rounded down."""
    return (resized[0] - target[0]) // 2, (resized[1] - target[1]) // 2


def still_crop_corner(resized: Size, target: Size) -> tuple[int, int]:
    """Top left (row, column) of the centre crop of a still, rounded half to even."""
    return round((resized[0] - target[0]) / 2), round((resized[1] - target[1]) / 2)


def _resize_crop(x: Tensor, target: Size) -> Tensor:
    """Float [T, C, H, W] -> float [T, C, target height, target width], values as they are."""
    source = (x.shape[-2], x.shape[-1])
    resized = cover_size(source, target)
    if resized != source:
        with _one_thread():
            x = F.interpolate(x, size=resized, mode="bilinear", align_corners=False)
    top, left = crop_corner(resized, target)
    return x[..., top : top + target[0], left : left + target[1]]


def normalize(video: Tensor) -> Tensor:
    """uint8 in [0, 255] -> float32 in [-1, 1], same shape and device."""
    return (video.float() / 255 - 0.5) / 0.5


def resize_crop_video(frames: Tensor, target: Size) -> Tensor:
    """uint8 [T, C, H, W] -> float32 [T, C, *target] in [-1, 1], resized to cover `target` and cropped at the centre."""
    return (_resize_crop(frames.float() / 255, target) - 0.5) / 0.5


def resize_crop_uint8(frames: Tensor, target: Size) -> Tensor:
    """As `resize_crop_video`, but uint8 in and out: resized once in float32, rounded once.

    Frames are taken one by one, so that memory stays that of one frame in float32. `normalize` of the result differs
    from `resize_crop_video` by half a level, 1/255, at most.
    """
    count, channels = frames.shape[:2]
    out = torch.empty((count, channels, *target), dtype=torch.uint8)
    for i in range(count):
        out[i] = _resize_crop(frames[i : i + 1].float(), target)[0].round_().clamp_(0, 255)
    return out


def resize_crop_image(pixels: NDArray[np.uint8], target: Size) -> Tensor:
    """uint8 RGB still [H, W, 3] -> uint8 [3, *target], resized (bicubic, antialiased) to cover it and cropped."""
    resized = cover_size((pixels.shape[0], pixels.shape[1]), target)
    image = Image.fromarray(pixels).resize((resized[1], resized[0]), Image.Resampling.BICUBIC)
    top, left = still_crop_corner(resized, target)
    image = image.crop((left, top, left + target[1], top + target[0]))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
