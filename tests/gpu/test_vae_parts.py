"""HunyuanVideo VAE, discriminator, LPIPS and the adversarial step on CUDA, in bf16 against fp32."""

from __future__ import annotations

import pytest
import torch
from support.golden import fill_by_rule, rule_tensor
from torch import Tensor, nn

from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.model.discriminator import NLayerDiscriminator3D
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.losses import LastConvRecorder, vae_gan_loss
from osora_cli.model.perceptual import LPIPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want).norm() / want.norm())


def clip(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1).cuda()


@torch.no_grad()
def test_hunyuan_vae_bf16() -> None:
    model = HunyuanVae(HunyuanVaeConfig())
    fill_by_rule(model)
    model.cuda().eval()
    x = clip(1, 3, 17, 128, 128)
    z = model.encode(x, sample_posterior=False)
    rec = model.decode(z)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        by_autocast = [distance(model.encode(x, sample_posterior=False), z), distance(model.decode(z), rec)]
    model.bfloat16()
    in_bf16 = [distance(model.encode(x, sample_posterior=False), z), distance(model.decode(z), rec)]
    print(f"relative L2 of z and rec: autocast {by_autocast}, bf16 {in_bf16}")
    assert max(by_autocast) < 2e-2
    assert max(in_bf16) < 5e-2


def lpips(compute_dtype: torch.dtype) -> LPIPS:
    net = LPIPS(compute_dtype=compute_dtype)
    constants = {k: v.clone() for k, v in net.state_dict().items() if "scaling" in k}
    fill_by_rule(net, rule=lambda key, shape, dtype: _lpips_rule(key, shape, dtype, constants))
    return net.cuda()


def _lpips_rule(key: str, shape: torch.Size, dtype: torch.dtype, constants: dict[str, Tensor]) -> Tensor:
    if key in constants:
        return constants[key]
    drawn = rule_tensor(key, shape, dtype)
    return drawn.abs() if key.startswith("lin") else drawn * 2.83 if len(shape) > 1 else drawn


@pytest.mark.parametrize("compiled", [False, True])
def test_lpips_bf16_and_memory_by_chunk(compiled: bool) -> None:
    target = clip(32, 3, 256, 256)
    recon = (target + 0.1 * torch.randn_like(target)).clamp(-1, 1).requires_grad_(True)
    want = lpips(torch.float32)(target, recon)
    (gradient,) = torch.autograd.grad(want.sum(), recon)
    low = lpips(torch.bfloat16)
    if compiled:
        low.compile(fullgraph=True, dynamic=False)
    low(target, recon)  # kernels are chosen or compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        start.record()
        got = low(target, recon)
        (low_gradient,) = torch.autograd.grad(got.sum(), recon)
        end.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    took = f"{start.elapsed_time(end):.1f} ms with gradient, peak {peak:.2f} GiB"
    print(f"LPIPS 32x256x256 bf16, compiled {compiled}: {took}")
    assert distance(got, want) < 2e-2
    assert distance(low_gradient, gradient) < 0.1
    assert peak < 3


def test_adversarial_step_in_bf16_matches_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(4, 32, 3, padding=1), nn.SiLU(), nn.Conv3d(32, 3, 3, padding=1)).cuda()
    discriminator = NLayerDiscriminator3D().cuda()
    for module in discriminator.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    video, z = clip(1, 3, 8, 128, 128), torch.randn(1, 4, 8, 128, 128, device="cuda")
    weights = []
    for low in (False, True):
        recorder = LastConvRecorder.of(model, model[2].weight)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
            with recorder:
                recon = model(z)
            loss = vae_gan_loss(
                video, recon, recorder, discriminator, update=0, perceptual_weight=0.0, kl_weight=0.0, disc_weight=0.05
            )
        loss.objective.backward()
        weights.append(float(loss.weight))
        assert loss.objective.dtype == torch.float32
    assert weights[1] == pytest.approx(weights[0], rel=0.1)
    assert all(p.grad is None for p in discriminator.parameters())
