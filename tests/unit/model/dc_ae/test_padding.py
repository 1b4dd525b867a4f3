"""Clips of any length and size: padded by repetition, cut back; real frames."""

from __future__ import annotations

import pytest
import torch
from support.clips import real_clip
from support.dc_ae import light_config, lively, small_config
from torch import Tensor

from osora_cli.data.media import read_frames
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.padding import decode_any, encode_any, pad_clip, padded_size, reconstruct_any_size


@pytest.fixture(scope="module")
def frames() -> Tensor:
    """24 frames of a real clip, 176x144 px, in [-1, 1]: [1, 3, 24, 144, 176]."""
    pictures = torch.from_numpy(read_frames(real_clip("carphone_pristine"), range(24)))
    return (pictures.permute(3, 0, 1, 2).float() / 127.5 - 1).unsqueeze(0)


@pytest.fixture(scope="module")
def net() -> DcAe:
    return lively(DcAe(small_config())).eval()


@pytest.mark.parametrize(
    ("size", "padded"),
    [
        ((1, 8, 8), (1, 8, 8)),
        ((1, 1, 9), (1, 8, 16)),
        ((2, 8, 8), (8, 8, 8)),
        ((4, 8, 8), (8, 8, 8)),
        ((8, 8, 8), (8, 8, 8)),
        ((9, 15, 17), (12, 16, 24)),
        ((13, 16, 16), (16, 16, 16)),
    ],
)
def test_padded_size(size: tuple[int, int, int], padded: tuple[int, int, int]) -> None:
    assert padded_size(*size, time=4, space=8) == padded


def test_time_that_is_not_compressed_is_not_padded() -> None:
    assert [padded_size(n, 8, 8, time=1, space=8)[0] for n in (1, 2, 3, 7)] == [1, 2, 3, 7]
    assert [padded_size(n, 8, 8, time=2, space=8)[0] for n in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 6]


def test_padding_repeats_the_last_frame_row_and_column(frames: Tensor) -> None:
    x = frames[:, :, :3, :13, :10]
    padded = pad_clip(x, (8, 16, 16))
    assert torch.equal(padded[:, :, :3, :13, :10], x)
    for t in range(3, 8):
        assert torch.equal(padded[:, :, t], padded[:, :, 2])
    for y in range(13, 16):
        assert torch.equal(padded[:, :, :, y], padded[:, :, :, 12])
    for column in range(10, 16):
        assert torch.equal(padded[..., column], padded[..., 9])
    assert pad_clip(x, (3, 13, 10)) is x


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 11, 24])
@pytest.mark.parametrize("size", [(16, 16), (17, 31), (5, 40), (1, 1)])
def test_size_out_is_size_in(net: DcAe, frames: Tensor, length: int, size: tuple[int, int]) -> None:
    x = frames[:, :, :length, : size[0], : size[1]]
    with torch.no_grad():
        rebuilt, z = reconstruct_any_size(net, x)
        latents, kept = encode_any(net, x)
        assert torch.equal(decode_any(net, latents, kept), rebuilt)
    assert rebuilt.shape == x.shape
    assert z.shape[2] == (1 if length == 1 else max(2, -(-length // 4)))
    assert bool(torch.isfinite(rebuilt).all())


def test_clips_that_fit_are_what_forward_gives(net: DcAe, frames: Tensor) -> None:
    x = frames[:, :, :8, :64, :64]
    with torch.no_grad():
        assert torch.equal(reconstruct_any_size(net, x)[0], net(x)[0])


@pytest.mark.parametrize("time", [1, 2, 4, 8])
def test_every_time_compression(time: int, frames: Tensor) -> None:
    model = lively(DcAe(light_config(time, 8)))
    with torch.no_grad():
        for length in range(1, 2 * time + 3):
            assert reconstruct_any_size(model, frames[:, :, :length, :8, :9])[0].shape[2:] == (length, 8, 9)


def test_long_clips_in_tiles(frames: Tensor) -> None:
    settings = {"use_temporal_tiling": True, "temporal_tile_size": 8, "tile_overlap_factor": 0.5}
    model = lively(DcAe(light_config(4, 8, **settings)))
    with torch.no_grad():
        for length in (9, 13, 17, 21, 23):
            assert reconstruct_any_size(model, frames[:, :, :length, :8, :8])[0].shape[2] == length


def test_dtype_out_is_dtype_in(net: DcAe, frames: Tensor) -> None:
    half = DcAe(small_config())
    half.load_state_dict(net.state_dict())
    half.to(torch.bfloat16)
    x = frames[:, :, :5, :17, :17]
    with torch.no_grad():
        rebuilt, z = reconstruct_any_size(half, x)
        exact, _ = reconstruct_any_size(net, x)
    assert (rebuilt.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    assert float((rebuilt - exact).norm() / exact.norm()) < 2e-2
