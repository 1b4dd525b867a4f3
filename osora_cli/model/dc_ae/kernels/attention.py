"""ReLU linear attention over all positions of a clip, two passes forth and two back.

With S = relu(k)^T v and s = the sum of relu(k) over the positions: out = relu(q) S / (relu(q) s + eps), head by head.
Shape suffixes: B clip, N positions (T * H * W), h heads, d and e channels of a head, S partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osora_cli.model.dc_ae.kernels.common import channels_last, launch, tl, triton

_BLOCK_N = 128
_PROGRAMS = 1056


def linear_attention(sources: Sequence[Tensor], dim: int, eps: float) -> Tensor:
    """Attention of each head of each source; the heads of all sources side by side.

    Args:
        sources: [B, 3 h d, T, H, W] each, head-major: for each head q, then k, then v, of `dim` channels.

    Returns:
        [B, (sum of h) d, T, H, W], in the dtype of the sources. Sums are fp32.
    """
    return _LinearAttention.apply(dim, eps, *sources)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, eps: float, *sources: Tensor) -> Tensor:
        kept = [channels_last(source) for source in sources]
        batch, _, *size = kept[0].shape
        heads = [source.shape[1] // (3 * dim) for source in kept]
        out = torch.empty(
            (batch, sum(heads) * dim, *size),
            dtype=kept[0].dtype, device=kept[0].device, memory_format=torch.channels_last_3d,
        )  # fmt: skip
        states = []
        for i, source in enumerate(kept):
            state = _state(source, heads[i], dim)
            positions = source.shape[2:].numel()
            launch(
                _read, (triton.cdiv(positions, _BLOCK_N), batch * heads[i]),
                source, state, out, positions, heads[i], sum(heads), sum(heads[:i]), eps,
                DIM=dim, HALF=source.dtype == torch.bfloat16, BLOCK_N=_BLOCK_N, num_warps=4,
            )  # fmt: skip
            states.append(state)
        ctx.dim, ctx.eps, ctx.heads = dim, eps, heads
        ctx.save_for_backward(*kept, *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.heads)
        saved = ctx.saved_tensors  # once: recomputation unpacks a tensor one time only
        sources, states = saved[:count], saved[count:]
        grad = channels_last(grad)
        grads = []
        for i, (source, state) in enumerate(zip(sources, states, strict=True)):
            positions, heads = source.shape[2:].numel(), ctx.heads[i]
            pairs = len(source) * heads
            splits = _splits(positions, pairs)
            grad_source = torch.empty_like(source)
            part = torch.empty(splits, pairs, ctx.dim + 1, ctx.dim, dtype=torch.float32, device=source.device)
            shared = {"DIM": ctx.dim, "HALF": source.dtype == torch.bfloat16, "BLOCK_N": _BLOCK_N, "num_warps": 4}
            launch(
                _read_backward, (pairs, splits),
                source, state, grad, grad_source, part, positions, heads, sum(ctx.heads), sum(ctx.heads[:i]), pairs,
                ctx.eps, **shared,
            )  # fmt: skip
            launch(
                _write_backward,
                (triton.cdiv(positions, _BLOCK_N), pairs),
                source,
                part.sum(0),
                grad_source,
                positions,
                heads,
                **shared,
            )
            grads.append(grad_source)
        return None, None, *grads


def _splits(positions: int, pairs: int) -> int:
    return max(1, min(triton.cdiv(positions, _BLOCK_N), _PROGRAMS // pairs))


def _state(source: Tensor, heads: int, dim: int) -> Tensor:
    """S, and below it s: [B h, d + 1, e] in fp32."""
    positions, pairs = source.shape[2:].numel(), len(source) * heads
    splits = _splits(positions, pairs)
    part = torch.empty(splits, pairs, dim + 1, dim, dtype=torch.float32, device=source.device)
    launch(
        _write, (pairs, splits),
        source, part, positions, heads, pairs,
        DIM=dim, HALF=source.dtype == torch.bfloat16, BLOCK_N=_BLOCK_N, num_warps=4,
    )  # fmt: skip
    return part.sum(0)


@triton.jit
def _product(a, b, HALF: tl.constexpr):
    """Matrix product with sums in fp32: of bf16, or of exact fp32."""
    if HALF:
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return out


@triton.jit
def _write(x_ptr, part_ptr, positions, heads, pairs, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr):
    pair = tl.program_id(0)
    d = tl.arange(0, DIM)
    base = x_ptr + (pair // heads).to(tl.int64) * positions * heads * 3 * DIM + pair % heads * 3 * DIM
    state = tl.zeros((DIM, DIM), tl.float32)
    total = tl.zeros((BLOCK_N, DIM), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(positions, BLOCK_N), tl.num_programs(1)):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = n.to(tl.int64)[:, None] * heads * 3 * DIM + d[None, :]
        inside = (n < positions)[:, None]
        k = tl.load(base + at + DIM, mask=inside, other=0.0)
        k = tl.where(k > 0, k, 0.0)
        v = tl.load(base + at + 2 * DIM, mask=inside, other=0.0)
        state += _product(tl.trans(k), v, HALF)
        total += k.to(tl.float32)
    out = part_ptr + (tl.program_id(1) * pairs + pair).to(tl.int64) * (DIM + 1) * DIM
    tl.store(out + d[:, None] * DIM + d[None, :], state)
    tl.store(out + DIM * DIM + d, tl.sum(total, 0))


@triton.jit
def _read(
    x_ptr, state_ptr, out_ptr, positions, heads, all_heads, first_head, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    d = tl.arange(0, DIM)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < positions)[:, None]
    row = (pair // heads).to(tl.int64) * positions + n
    q = tl.load(x_ptr + row[:, None] * heads * 3 * DIM + pair % heads * 3 * DIM + d[None, :], mask=inside, other=0.0)
    q = tl.where(q > 0, q, 0.0)
    state_ptr += pair * (DIM + 1) * DIM
    state = tl.load(state_ptr + d[:, None] * DIM + d[None, :])
    total = tl.load(state_ptr + DIM * DIM + d)
    below = tl.sum(q.to(tl.float32) * total[None, :], 1) + eps
    out = _product(q, state, HALF) / below[:, None]
    at = row[:, None] * all_heads * DIM + (first_head + pair % heads) * DIM + d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _read_backward(
    x_ptr, state_ptr, grad_ptr, grad_x_ptr, part_ptr, positions, heads, all_heads, first_head, pairs, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of q, and partial sums of those of S and s."""
    pair = tl.program_id(0)
    d = tl.arange(0, DIM)
    element = grad_x_ptr.dtype.element_ty
    state_ptr += pair * (DIM + 1) * DIM
    state = tl.load(state_ptr + d[:, None] * DIM + d[None, :])
    total = tl.load(state_ptr + DIM * DIM + d)
    grad_state = tl.zeros((DIM, DIM), tl.float32)
    grad_total = tl.zeros((BLOCK_N, DIM), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(positions, BLOCK_N), tl.num_programs(1)):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (n < positions)[:, None]
        row = (pair // heads).to(tl.int64) * positions + n
        at = row[:, None] * heads * 3 * DIM + pair % heads * 3 * DIM + d[None, :]
        q = tl.load(x_ptr + at, mask=inside, other=0.0)
        q = tl.where(q > 0, q, 0.0)
        grad_at = row[:, None] * all_heads * DIM + (first_head + pair % heads) * DIM + d[None, :]
        grad = tl.load(grad_ptr + grad_at, mask=inside, other=0.0).to(tl.float32)
        per = 1.0 / (tl.sum(q.to(tl.float32) * total[None, :], 1) + eps)
        above = _product(q, state, HALF)
        grad_above = grad * per[:, None]
        grad_below = -tl.sum(grad_above * above, 1) * per
        grad_q = _product(grad_above, tl.trans(state), HALF) + grad_below[:, None] * total[None, :]
        tl.store(grad_x_ptr + at, tl.where(q > 0, grad_q, 0.0).to(element), mask=inside)

        grad_state += _product(tl.trans(q), grad_above, HALF)
        grad_total += q.to(tl.float32) * grad_below[:, None]
    out = part_ptr + (tl.program_id(1) * pairs + pair).to(tl.int64) * (DIM + 1) * DIM
    tl.store(out + d[:, None] * DIM + d[None, :], grad_state)
    tl.store(out + DIM * DIM + d, tl.sum(grad_total, 0))


@triton.jit
def _write_backward(
    x_ptr, grad_state_ptr, grad_x_ptr, positions, heads,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of k and v from those of S and s."""
    pair = tl.program_id(1)
    d = tl.arange(0, DIM)
    element = grad_x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < positions)[:, None]
    row = (pair // heads).to(tl.int64) * positions + n
    at = row[:, None] * heads * 3 * DIM + pair % heads * 3 * DIM + d[None, :]
    k = tl.load(x_ptr + at + DIM, mask=inside, other=0.0)
    k = tl.where(k > 0, k, 0.0)
    v = tl.load(x_ptr + at + 2 * DIM, mask=inside, other=0.0)
    grad_state_ptr += pair * (DIM + 1) * DIM
    grad_state = tl.load(grad_state_ptr + d[:, None] * DIM + d[None, :])
    grad_total = tl.load(grad_state_ptr + DIM * DIM + d)
    grad_k = _product(v, tl.trans(grad_state), HALF) + grad_total[None, :]
    tl.store(grad_x_ptr + at + DIM, tl.where(k > 0, grad_k, 0.0).to(element), mask=inside)
    tl.store(grad_x_ptr + at + 2 * DIM, _product(k, grad_state, HALF).to(element), mask=inside)
