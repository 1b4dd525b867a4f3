"""How much device memory a computation holds at its most, from a run on the meta device.

Meta tensors have shapes and no values: a forward and backward on them takes seconds and no memory, and every tensor
that a real run would hold lives just as long here. What is not seen: workspaces of the libraries, the allocator's
fragmentation, and what a custom operator makes and drops inside. `fused_attention` traces attention as a GPU runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The CUDA caching allocator hands memory out in blocks of this size.
BLOCK = 512


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages that are made while it is on, for as long as each is alive.

    Attributes:
        live: bytes held now.
        peak: most bytes held at once.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """`known`: tensors that are counted elsewhere (parameters, optimizer state)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: set[int] = set()
        self._kept = [tensor.untyped_storage() for tensor in known]
        self._seen.update(storage._cdata for storage in self._kept)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
                self._add(leaf)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@contextmanager
def fused_attention() -> Iterator[None]:
    """While it is on, attention without a mask is one fused operator, as on a GPU.

    On the meta device torch takes the plain form, whose matrix of all pairs would be most of the memory of a long clip.
    The function itself is exchanged, for the whole process: torch's function modes are off in a backward pass, where
    recomputed blocks call it again.
    """
    plain = functional.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        if rest or options or query.device.type != "meta":
            return plain(query, key, value, *rest, **options)
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, grad)[0]
        return out

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain
