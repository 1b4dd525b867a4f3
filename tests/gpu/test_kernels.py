"""The Triton kernels on a GPU, against torch in fp64; and the whole net with and without them."""

from __future__ import annotations

import pytest
import torch
from support.dc_ae import lively, small_config
from support.kernel_cases import cases, errors

from osora_cli.model.dc_ae import kernels
from osora_cli.model.dc_ae.autoencoder import DcAe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
def test_kernels_are_torch_in_output_and_gradients(dtype: torch.dtype, bound: float) -> None:
    found = {case[0]: errors(case, "cuda", dtype) for case in cases()}
    assert {case: error for case, error in found.items() if not max(error) < bound} == {}


def test_the_same_bits_twice() -> None:
    for case in cases():
        torch.manual_seed(1)
        first = errors(case, "cuda", torch.bfloat16)
        torch.manual_seed(1)
        assert errors(case, "cuda", torch.bfloat16) == first, case[0]


@pytest.mark.parametrize("frames", [1, 8])
def test_the_net_is_the_same_without_them(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = lively(DcAe(small_config())).cuda()
    x = torch.randn(2, 3, frames, 32, 24).clamp(-1, 1).cuda()

    def run() -> list[torch.Tensor]:
        net.zero_grad()
        rec, _, z = net(x)
        (rec - x).abs().sum().backward()
        return [rec.detach(), z.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    assert kernels.usable(x)
    with_kernels = run()
    monkeypatch.setattr(kernels, "usable", lambda x: False)
    for one, other in zip(with_kernels, run(), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4
