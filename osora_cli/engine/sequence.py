"""Sequence parallelism for the MMDiT: neighbouring ranks share the tokens of a sample.

Everything in the network but attention works token by token, so each rank takes its part of text and image and runs
the blocks on it. For attention queries, keys and values change from "all heads of my tokens" to "my heads of all
tokens" and back, by all-to-all (DeepSpeed-Ulysses, Jacobs et al. 2023). Ranks of a group have the same inputs and the
same outputs.

Shapes: B batch, L tokens of this rank, S tokens of all, H heads, G heads of this rank, D channels of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from osora_cli.errors import ConfigError
from osora_cli.model.mmdit.attention import full_attention
from osora_cli.model.mmdit.model import MMDiT

# Inputs of the network that have a token axis (the second), by whose tokens they are.
_TEXT, _IMAGE = ("txt", "txt_ids"), ("img", "img_ids", "cond")


def split_tokens(module: nn.Module, device: torch.device, sequence: int) -> None:
    """Have `module`, an MMDiT, share each sample's tokens over groups of `sequence` ranks. All ranks call it.

    Inputs and outputs stay whole. Gradients are made such that their mean over all ranks is that of the samples.

    Raises:
        ConfigError: another network, or heads that cannot be shared out.
    """
    if not isinstance(module, MMDiT):
        raise ConfigError(
            f"a `{type(module).__name__}` has no token sequence that ranks could share",
            where="plugin_config.sp_size",
            allowed="1",
        )
    check_heads(module.config.num_heads, sequence)
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // sequence, sequence), mesh_dim_names=("data", "sequence")
    )
    _Splitter(mesh.get_group("sequence")).attach(module)


def check_heads(num_heads: int, sequence: int) -> None:
    """Raises ConfigError where `num_heads` attention heads cannot be dealt out to `sequence` ranks."""
    if num_heads % sequence:
        raise ConfigError(
            f"`plugin_config.sp_size` is `{sequence}`, and the model's {num_heads} attention heads cannot be shared "
            "out evenly",
            where="plugin_config.sp_size",
            allowed=f"divisors of {num_heads}",
        )


def part_sizes(tokens: int, parts: int) -> list[int]:
    """Tokens of each rank: as even as can be, the first ranks one more."""
    return [tokens // parts + (rank < tokens % parts) for rank in range(parts)]


class _Splitter:
    """Hooks of one network."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._image: list[int] = []

    def attach(self, module: MMDiT) -> None:
        self._signature = inspect.signature(module.forward)
        module.register_forward_pre_hook(self._split, with_kwargs=True)
        module.register_forward_hook(self._join)

    def _split(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs = self._signature.bind(*args, **kwargs).arguments
        text = part_sizes(inputs["txt"].shape[1], self._size)
        self._image = part_sizes(inputs["img"].shape[1], self._size)
        for names, sizes in ((_TEXT, text), (_IMAGE, self._image)):
            for name in names:
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name].split(sizes, dim=1)[self._rank]
        # A new one each time: blocks that are computed again in the backward pass keep the one they were called with.
        assert isinstance(module, MMDiT)
        module.attend = _SharedHeads(self._group, [a + b for a, b in zip(text, self._image, strict=True)])
        return (), dict(inputs)

    def _join(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        joined: Tensor = _GatherTokens.apply(output, self._image, self._group)  # type: ignore[no-untyped-call]
        return joined


class _SharedHeads:
    """Attention over the tokens of all ranks of a group, each with its own heads.

    Args:
        lengths: tokens of each rank, in rank order.
    """

    def __init__(self, group: Any, lengths: Sequence[int]) -> None:
        self._group = group
        self._lengths = list(lengths)

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        # One exchange for the three: they have the same shape.
        qkv_BLHD = torch.stack([q_BLHD, k_BLHD, v_BLHD])
        q_BSGD, k_BSGD, v_BSGD = self._to_heads(qkv_BLHD)
        # Keys come rank after rank, not text first: the order of tokens makes no difference to attention.
        return self._to_tokens(full_attention(q_BSGD, k_BSGD, v_BSGD))

    def _to_heads(self, x_NBLHD: Tensor) -> Tensor:
        """`[N, B, L, H, D]` to `[N, B, S, G, D]`."""
        n, b, length, heads, channels = x_NBLHD.shape
        ranks = len(self._lengths)
        x = x_NBLHD.reshape(n, b, length, ranks, heads // ranks, channels).permute(3, 2, 0, 1, 4, 5)
        x = _exchange(x.reshape(ranks * length, -1), [length] * ranks, self._lengths, self._group)
        return x.view(-1, n, b, heads // ranks, channels).permute(1, 2, 0, 3, 4)

    def _to_tokens(self, x_BSGD: Tensor) -> Tensor:
        """`[B, S, G, D]` to `[B, L, H, D]`."""
        b, tokens, own, channels = x_BSGD.shape
        ranks = len(self._lengths)
        length = self._lengths[dist.get_rank(self._group)]
        x = x_BSGD.transpose(0, 1).reshape(tokens, -1)
        x = _exchange(x, self._lengths, [length] * ranks, self._group)
        return x.view(ranks, length, b, own, channels).permute(2, 1, 0, 3, 4).reshape(b, length, ranks * own, channels)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Rows of a matrix, `sent[r]` to rank r and `received[r]` from it, with the way back for gradients."""
    out: Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _GatherTokens(torch.autograd.Function):
    """`[B, L, F]` of each rank to `[B, S, F]` on all.

    Every rank computes the same loss from it, so a rank's own rows of the gradient are all there is to it. Times the
    number of ranks: the engine takes the mean over all ranks, and parts of one sample have to be added.
    """

    @staticmethod
    def forward(ctx: Any, x_BLF: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.rank = list(sizes), dist.get_rank(group)
        longest = max(sizes)
        padded = x_BLF.new_zeros(x_BLF.shape[0], longest, x_BLF.shape[2])
        padded[:, : x_BLF.shape[1]] = x_BLF
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, None, None]:
        return grad_BSF.split(ctx.sizes, dim=1)[ctx.rank] * len(ctx.sizes), None, None
