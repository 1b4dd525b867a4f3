"""Host memory for what recomputed blocks keep: their inputs wait for the backward pass beside the GPU, not in it.

With every block recomputed, the inputs of all blocks are what is left of the activations. For a long clip they are as
large as the weights: a block's input is tokens x width x 2 bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Held:
    """A tensor moved out; its place is free again once it was taken back and nothing refers to it."""

    def __init__(self, buffer: HostBuffer, place: Tensor, device: torch.device) -> None:
        self.buffer, self.place, self.device = buffer, place, device

    def __del__(self) -> None:
        self.buffer.release(self.place)


class HostBuffer:
    """At most `capacity` bytes of host memory, page-locked where there is a GPU; what does not fit stays on it.

    Copies run in order with the computation, so nothing has to be waited for. Places are kept for the next step, and
    given up for those of another size when a batch of another shape needs the room.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes."""
        self.capacity = capacity
        self.used = 0
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def holding(self) -> AbstractContextManager[None]:
        """Tensors that autograd saves within are moved into the buffer, as far as it reaches."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def release(self, place: Tensor) -> None:
        """A place may be used again."""
        self._free.setdefault((place.dtype, place.shape), []).append(place)

    def _pack(self, value: Tensor) -> Tensor | _Held:
        if isinstance(value, torch.nn.Parameter) or value.numel() == 0:
            return value
        place = self._place(value)
        if place is None:
            return value
        place.copy_(value.detach(), non_blocking=True)
        return _Held(self, place, value.device)

    def _unpack(self, kept: Tensor | _Held) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        # A copy also on the CPU: the place may be filled again while autograd still uses the value.
        return kept.place.to(kept.device, non_blocking=True, copy=True)

    def _place(self, value: Tensor) -> Tensor | None:
        free = self._free.get((value.dtype, value.shape))
        if free:
            return free.pop()
        size = value.numel() * value.element_size()
        if self.used + size > self.capacity:
            self._drop_free(self.used + size - self.capacity)
        if self.used + size > self.capacity:
            return None
        self.used += size
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)

    def _drop_free(self, wanted: int) -> None:
        """Give up free places until `wanted` bytes are gained, or there are none."""
        for places in self._free.values():
            while places and wanted > 0:
                place = places.pop()
                size = place.numel() * place.element_size()
                self.used -= size
                wanted -= size
