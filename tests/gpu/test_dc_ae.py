"""Video DC-AE on CUDA: as on the CPU in fp32, near it in bf16, no waiting for the device, a step of training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
from support.dc_ae import lively, small_config
from support.golden import fill_by_rule
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(scope="module")
def full_net() -> DcAe:
    model = build_model(DcAeConfig(model_name="dc-ae-f32t4c128"), device="meta")
    assert isinstance(model, DcAe)
    fill_by_rule(model.to_empty(device="cuda"))
    return model.eval()


def clip(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("frames", [1, 8])
def test_cuda_is_the_cpu(frames: int) -> None:
    """Output, latents and every gradient in fp32."""
    here = lively(DcAe(small_config()))
    there = DcAe(small_config()).cuda()
    there.load_state_dict(here.state_dict())
    x = clip(2, 3, frames, 32, 24)
    results = []
    for model, video in ((here, x), (there, x.cuda())):
        rec, _, z = model(video)
        (rec - video).abs().sum().backward()
        results.append([rec, z, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert distance(other.detach().cpu(), one.detach()) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 16])
def test_full_net_in_bf16(full_net: DcAe, frames: int) -> None:
    x = clip(1, 3, frames, 256, 256).cuda()
    rec, _, z = full_net(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rec_auto, _, z_auto = full_net(x)
    half = DcAe(full_net.config).cuda().to(torch.bfloat16)
    half.load_state_dict(full_net.state_dict())
    rec_half, _, z_half = half(x)
    errors = {"rec": distance(rec_half, rec), "z": distance(z_half, z)}
    by_autocast = {"rec": distance(rec_auto, rec), "z": distance(z_auto, z)}
    print(f"T={frames}: bf16 weights {errors}, autocast {by_autocast}")
    assert max(errors.values()) < 2e-2
    assert max(by_autocast.values()) < 2e-2


def test_the_forward_and_backward_pass_do_not_wait_for_the_device() -> None:
    model = lively(DcAe(small_config(use_spatial_tiling=True, spatial_tile_size=32))).cuda()
    model.enable_grad_checkpoint()
    x = clip(1, 3, 8, 48, 48).cuda()
    model(x)[0].sum().backward()
    try:
        _sync_debug_mode("error")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(x)[0] - x).abs().mean()
        loss.backward()
    finally:
        _sync_debug_mode("default")


def _sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_of_the_full_net(full_net: DcAe, recompute: bool) -> None:
    """Time and memory of forward and backward for one clip of 32 frames of 256x256; both are printed."""
    x = clip(1, 3, 32, 256, 256).cuda()
    full_net.enable_grad_checkpoint(recompute)

    def step() -> None:
        full_net.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            rec, _, _ = full_net(x)
        (rec.float() - x).abs().mean().backward()

    torch.cuda.reset_peak_memory_stats()
    seconds, peak = timed(step), torch.cuda.max_memory_allocated() / 2**30
    full_net.enable_grad_checkpoint(False)
    print(f"1x3x32x256x256, recompute {recompute}: {seconds * 1e3:.0f} ms, {peak:.1f} GiB")
    assert all(bool(torch.isfinite(p.grad).all()) for p in full_net.parameters() if p.grad is not None)
    assert seconds < 10
