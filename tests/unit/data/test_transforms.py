from __future__ import annotations

import numpy as np
import pytest
import torch
from support.golden import assert_close, golden_tensor, load_item, load_json
from torch import Tensor

from osora_cli.data.transforms import (
    cover_size,
    crop_corner,
    normalize,
    resize_crop_image,
    resize_crop_uint8,
    resize_crop_video,
)

GOLDEN = load_json("transforms")
_CASES = {case["id"]: case for case in GOLDEN["cases"]}
VIDEO = [case for case in GOLDEN["cases"] if case["id"].startswith("video_resize_crop")]
IMAGE = [case for case in GOLDEN["cases"] if case["id"].startswith("image_resize_crop")]


def _frames(case: dict) -> Tensor:
    spec = case["inputs"]["x"]
    generator = torch.Generator().manual_seed(spec["seed"])
    return torch.randint(0, 256, tuple(spec["shape"]), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("case", VIDEO, ids=lambda case: case["id"])
def test_videos_are_resized_and_cropped_as_golden(case: dict) -> None:
    meta, _ = load_item("transforms")
    assert_close(meta, case["outputs"]["out"], resize_crop_video(_frames(case), tuple(case["size"])))


@pytest.mark.parametrize("case", VIDEO, ids=lambda case: case["id"])
def test_rounding_to_uint8_costs_half_a_level_at_most(case: dict) -> None:
    meta, _ = load_item("transforms")
    want = golden_tensor(meta, case["outputs"]["out"])
    got = resize_crop_uint8(_frames(case), tuple(case["size"]))
    assert got.dtype == torch.uint8
    assert (normalize(got).reshape(-1)[:: case["outputs"]["out"]["stride"]] - want).abs().max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize("case", IMAGE, ids=lambda case: case["id"])
def test_stills_are_resized_and_cropped_as_golden(case: dict) -> None:
    meta, _ = load_item("transforms")
    video = _CASES[case["id"].replace("image", "video")]
    pixels = _frames(video)[0].permute(1, 2, 0).contiguous().numpy()
    got = normalize(resize_crop_image(pixels, tuple(case["size"])))
    want = golden_tensor(meta, case["outputs"]["out"])
    assert list(got.shape) == case["outputs"]["out"]["shape"]
    # One level: PIL rounds to uint8, and its versions may round a value another way.
    assert (got.reshape(-1)[:: case["outputs"]["out"]["stride"]] - want).abs().max() <= 1 / 127.5 + 1e-5


def test_geometry_is_as_golden() -> None:
    rows = GOLDEN["video_resize_crop_geometry"]["rows"]
    assert rows
    for height, width, target_h, target_w, resized, (top, left, crop_h, crop_w), error in rows:
        assert error is None
        target = (target_h, target_w)
        assert cover_size((height, width), target) == tuple(resized)
        assert (*crop_corner(cover_size((height, width), target), target), *target) == (top, left, crop_h, crop_w)


@pytest.mark.parametrize("size", [(64, 192), (192, 64)])
@pytest.mark.parametrize("target", [(64, 192), (192, 64), (32, 32), (96, 256), (16, 240)])
def test_non_square_frames_keep_their_orientation(size: tuple[int, int], target: tuple[int, int]) -> None:
    """Red rises to the right and green downwards, also after resize and crop, in every mix of shapes."""
    height, width = size
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * columns // (width - 1), 255 * rows // (height - 1), np.zeros_like(rows)], -1)
    video = torch.from_numpy(pixels.astype(np.uint8)).permute(2, 0, 1)[None]
    for got in (
        resize_crop_uint8(video, target)[0],
        resize_crop_image(pixels.astype(np.uint8), target),
        (resize_crop_video(video, target)[0] + 1) * 127.5,
    ):
        assert tuple(got.shape) == (3, *target)
        red, green = got[0].float(), got[1].float()
        assert red[:, -1].mean() > red[:, 0].mean()
        assert green[-1].mean() > green[0].mean()
        assert red.std(dim=0).max() < 1.5
        assert green.std(dim=1).max() < 1.5
        # The crop is centred: the mean is that of the middle.
        assert abs(red.mean() - 127.5) < 3
        assert abs(green.mean() - 127.5) < 3


def test_frames_of_the_right_size_pass_unchanged() -> None:
    frames = torch.randint(0, 256, (3, 3, 48, 80), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(resize_crop_uint8(frames, (48, 80)), frames)
    assert torch.equal(normalize(frames), resize_crop_video(frames, (48, 80)))


def test_normalize_spans_minus_one_to_one() -> None:
    got = normalize(torch.tensor([0, 255, 127, 128], dtype=torch.uint8))
    assert got.tolist() == pytest.approx([-1.0, 1.0, -1 / 255, 1 / 255], abs=1e-6)
    assert got[:2].tolist() == [-1.0, 1.0]
