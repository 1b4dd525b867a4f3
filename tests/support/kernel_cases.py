"""The Triton kernels of the DC-AE against torch in fp64: errors of output and gradients, case by case.

On CUDA called by tests/gpu. Elsewhere run as a program under TRITON_INTERPRET=1, Triton's interpreter on the CPU:
prints one JSON object of the errors by case (`few`: of the depthwise ones, whose interpretation is slow, three).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Case = tuple[str, Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def clip(*shape: int) -> Tensor:
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last_3d)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None = None) -> Tensor:
    y = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5) * weight.view(1, -1, 1, 1, 1) + bias.view(1, -1, 1, 1, 1)
    return y if shortcut is None else y + shortcut


def attention(*sources: Tensor) -> Tensor:
    x = torch.cat(sources, 1)
    q, k, v = x.permute(0, 2, 3, 4, 1).flatten(1, 3).unflatten(2, (-1, 96)).transpose(1, 2).split(32, -1)
    q, k = q.relu(), k.relu()
    out = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(2).unsqueeze(-1) + 1e-15)
    return out.transpose(1, 2).flatten(2).unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)


def gate(x: Tensor) -> Tensor:
    value, opens = x.chunk(2, 1)
    return value * F.silu(opens)


# (edge, channels, frames, rows, columns, clips)
DEPTHWISE = (
    (3, 70, 3, 5, 7, 2), (3, 16, 1, 8, 8, 1), (3, 64, 9, 3, 2, 1),
    (5, 40, 2, 9, 4, 1), (5, 16, 6, 3, 3, 2), (5, 96, 1, 6, 5, 1), (5, 64, 7, 4, 9, 1),
)  # fmt: skip
FEW_DEPTHWISE = ((3, 16, 1, 8, 8, 1), (3, 12, 3, 3, 2, 1), (5, 8, 3, 3, 2, 1))


def cases(depthwise_sizes: Sequence[tuple[int, ...]] = DEPTHWISE) -> Iterator[Case]:
    """Odd sizes, several clips, single frames: whatever a mask could miss."""
    from osora_cli.model.dc_ae import layers
    from osora_cli.model.dc_ae.kernels import activation, depthwise, grouped, norm, upsample
    from osora_cli.model.dc_ae.kernels import attention as linear

    for edge, channels, frames, rows, columns, batch in depthwise_sizes:
        yield (
            f"depthwise {edge} {channels}x{frames}x{rows}x{columns} of {batch}",
            depthwise.depthwise_conv,
            lambda x, w, b, edge=edge: F.conv3d(x, w, b, padding=edge // 2, groups=x.shape[1]),
            [clip(batch, channels, frames, rows, columns), torch.randn(channels, 1, edge, edge, edge) / edge,
             torch.randn(channels)],
        )  # fmt: skip
    for channels in (24, 128):
        scale = [torch.randn(channels), torch.randn(channels)]
        x, shortcut = clip(2, channels, 2, 3, 5), clip(2, channels, 2, 3, 5)
        yield f"norm {channels}", lambda x, w, b: norm.rms_norm(x, w, b, 1e-5), rms_norm, [x, *scale]
        yield (
            f"norm and shortcut {channels}", lambda x, w, b, s: norm.rms_norm(x, w, b, 1e-5, s), rms_norm,
            [x, *scale, shortcut],
        )  # fmt: skip
    for channels in (24, 192):
        yield (
            f"silu {channels}", activation.bias_silu, lambda x, b: F.silu(x + b.view(1, -1, 1, 1, 1)),
            [clip(2, channels, 3, 4, 5), torch.randn(channels)],
        )  # fmt: skip
        yield f"gate {channels}", activation.silu_gate, gate, [clip(2, 2 * channels, 3, 4, 5)]
    yield (
        "attention", lambda *s: linear.linear_attention(s, 32, 1e-15), attention,
        [clip(2, 192, 3, 5, 10), clip(2, 192, 3, 5, 10)],
    )  # fmt: skip
    yield (
        "grouped", grouped.grouped_pointwise, lambda x, w: F.conv3d(x, w, groups=6),
        [clip(2, 192, 3, 4, 15), torch.randn(192, 32, 1, 1, 1) / 6],
    )  # fmt: skip
    for factors, batch, channels, out, *size in (
        ((1, 2, 2), 2, 32, 16, 3, 4, 5), ((2, 2, 2), 1, 32, 16, 3, 4, 3),
        ((1, 2, 2), 1, 16, 16, 1, 4, 4), ((2, 2, 2), 2, 16, 16, 2, 2, 3),
    ):  # fmt: skip
        yield (
            f"upsample {factors} {channels} -> {out}",
            lambda x, w, b, f=factors: upsample.upsample_conv(x, w, b, f),
            lambda x, w, b, f=factors: layers.add_duplicated(F.conv3d(layers.upsample(x, f), w, b, padding=1), x, f),
            [clip(batch, channels, *size), torch.randn(out, channels, 3, 3, 3) / 20, torch.randn(out)],
        )  # fmt: skip


def errors(case: Case, device: str, dtype: torch.dtype) -> list[float]:
    """Relative L2 of the output and of each gradient, against fp64 on the same (rounded) values."""
    _, kernel, plain, inputs = case
    mine = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs]
    true = [x.detach().double().requires_grad_() for x in mine]
    got, want = kernel(*mine), plain(*true)
    grad = torch.randn(want.shape, dtype=torch.float64).to(device).to(dtype)
    got.backward(grad)
    want.backward(grad.double())
    pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(mine, true, strict=True))]
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp_min(1e-30)) for a, b in pairs]


if __name__ == "__main__":
    torch.manual_seed(0)
    chosen = cases(FEW_DEPTHWISE if "few" in sys.argv else DEPTHWISE)
    print(json.dumps({case[0]: errors(case, "cpu", torch.float32) for case in chosen}))
