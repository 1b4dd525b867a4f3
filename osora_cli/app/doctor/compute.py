"""torch, the GPU, and whether 3-D convolutions are right and quick."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from osora_cli import __version__
from osora_cli.app.doctor.finding import Finding
from osora_cli.model.conv import Conv3d
from osora_cli.model.dc_ae import kernels

# bf16 has 8 bits of mantissa: products of a few hundred terms stay well below this.
MAX_RELATIVE_ERROR = 1e-2
# Of a matrix product's rate. With cuDNN an H200 had 0.82; a share this low says that cuDNN is not used.
SLOW_SHARE = 0.15


def versions() -> Iterator[Finding]:
    """Python, osora, torch, CUDA and cuDNN."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found = {
        "osora": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    said = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    yield Finding("versions", "ok", said, values=found)
    if torch.__version__.startswith("2.9.0"):
        yield Finding(
            "torch 2.9.0",
            "warn",
            "this release does not use cuDNN for bf16 conv3d: slow, and with much more memory",
            "pip install 'torch!=2.9.0'",
        )


def devices() -> Iterator[Finding]:
    """The GPUs that torch sees, with their memory."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "torch sees no GPU" if built else "this torch is a build for the CPU"
        cure = "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES" if built else "install a CUDA build of torch for a GPU"
        yield Finding("GPU", "absent", f"{why}: trainings run on the CPU", cure)
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        yield Finding(
            f"GPU {index}",
            "warn" if busy else "ok",
            f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            "another process holds memory there: `nvidia-smi` names it" if busy else None,
            {"name": name, "free_bytes": free, "total_bytes": total},
        )


def convolution() -> Iterator[Finding]:
    """bf16 conv3d against fp32, forward and gradients; on a GPU its rate against a matrix product's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for frames in (2, 8):
        worst = max(conv3d_errors(device, frames))
        right = worst <= MAX_RELATIVE_ERROR
        yield Finding(
            f"conv3d bf16, {frames} frames",
            "ok" if right else "fail",
            f"relative error against fp32 {worst:.1e} on {device} (limit {MAX_RELATIVE_ERROR:g})",
            None if right else "train with `--dtype fp32`, or take another torch",
            {"relative_error": worst, "device": str(device)},
        )
    if device.type == "cuda":
        conv, product = _conv3d_rate(device), _matmul_rate(device)
        slow = conv < SLOW_SHARE * product
        yield Finding(
            "conv3d speed",
            "warn" if slow else "ok",
            f"{conv / 1e12:.0f} TFLOP/s in bf16; a matrix product has {product / 1e12:.0f}",
            "this torch does not use cuDNN here: take another torch" if slow else None,
            {"conv3d_flops": conv, "matmul_flops": product},
        )
        fault = kernels.fault_here()
        yield Finding(
            "DC-AE kernels",
            "ok" if fault is None else "warn",
            "Triton's run here" if fault is None else f"they do not run, and training is 1.6 times slower: {fault}",
            None
            if fault is None
            else "a CUDA build of torch brings Triton, which takes a C compiler (gcc) at first use",
        )


def conv3d_errors(device: torch.device, frames: int) -> tuple[float, float, float]:
    """Relative L2 error of a padded bf16 conv3d (as the networks call it) at output, input and weight gradient."""
    generator = torch.Generator().manual_seed(0)
    layer = Conv3d(16, 16, 3, padding=1, bias=False)
    weight = torch.randn(16, 16, 3, 3, 3, generator=generator) / 20
    x = torch.randn(2, 16, frames, 16, 16, generator=generator).to(device)
    grad = torch.randn(2, 16, frames, 16, 16, generator=generator).to(device)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        with torch.no_grad():
            layer.weight.copy_(weight)
        network = layer.to(device, dtype)
        given = x.to(dtype).requires_grad_(True)
        out = network(given)
        gradients = torch.autograd.grad(out, (given, network.weight), grad.to(dtype))
        return [t.detach().double() for t in (out, *gradients)]

    exact, rounded = run(torch.float32), run(torch.bfloat16)
    first, second, third = (float((b - a).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True))
    return first, second, third


def _conv3d_rate(device: torch.device) -> float:
    """FLOP/s of a 3x3x3 convolution of 256 channels."""
    x = torch.randn(1, 256, 16, 64, 64, device=device, dtype=torch.bfloat16)
    weight = torch.randn(256, 256, 3, 3, 3, device=device, dtype=torch.bfloat16)
    flops = 2 * 256 * 256 * 27 * 16 * 64 * 64
    return flops / _seconds(lambda: F.conv3d(x, weight, padding=1))


def _matmul_rate(device: torch.device) -> float:
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return 2 * 8192**3 / _seconds(lambda: a @ a)


def _seconds(act: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        act()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats
