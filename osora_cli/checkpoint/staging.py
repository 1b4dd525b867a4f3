"""Buffers that a snapshot is copied into, and how bytes get there from the host's or a GPU's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# torch leaves these two without types.
_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
_event: Callable[[], torch.cuda.Event] = torch.cuda.Event


def _timer() -> torch.cuda.Event:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(enable_timing=True)


@dataclass(frozen=True, eq=False)
class Slab:
    """One buffer: bytes as torch and as the writer see them."""

    tensor: torch.Tensor
    view: memoryview


class SlabPool:
    """Buffers of one size, made when first needed and used again by the next save.

    Args:
        slab_bytes: size of each.
        limit_bytes: the pool never holds more than this (but always one slab).
        pinned: page-locked memory, which a GPU copies into without a stop.
    """

    def __init__(self, slab_bytes: int, limit_bytes: int, *, pinned: bool) -> None:
        self.slab_bytes = slab_bytes
        self.pinned = pinned
        self._limit = max(1, limit_bytes // slab_bytes)
        self._made = 0
        self._free: list[Slab] = []
        self._changed = threading.Condition()

    def take(self) -> Slab | None:
        """A free slab, None when all the memory allowed is in use.

        Where the system has less memory than allowed, the pool stays at what it got: the copy goes in pieces then.

        Raises:
            RuntimeError: there is not even memory for one.
        """
        with self._changed:
            if self._free:
                return self._free.pop()
            return self._make() if self._made < self._limit else None

    def wait(self) -> Slab:
        """The next slab that is given back."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.pop()

    def _make(self) -> Slab | None:
        try:
            tensor = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        except (RuntimeError, MemoryError):
            if self._made == 0:
                raise
            self._limit = self._made
            return None
        self._made += 1
        array: Any = tensor.numpy()
        return Slab(tensor, memoryview(array))

    def reserve(self, total_bytes: int) -> None:
        """Make buffers for so many bytes now, as far as allowed: page-locking them takes longer than to fill them."""
        while True:
            with self._changed:
                if self._made * self.slab_bytes >= total_bytes or self._made >= self._limit:
                    return
                try:
                    slab = self._make()
                except (RuntimeError, MemoryError):
                    return  # the save itself will say so
                if slab is None:
                    return
                self._free.append(slab)
                self._changed.notify()

    def release(self, slab: Slab) -> None:
        with self._changed:
            self._free.append(slab)
            self._changed.notify()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as uint8 [nbytes]: a view where they lie so, else a copy on their device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Mark(Protocol):
    """A point in a stream of copies."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _Passed:
    """The mark of copies that are done when they return."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostCopier:
    """Copies from the host's memory: done when they return.

    `eager`: whether the writer may begin while copies are still to come. Here the training waits for the copies, and
    writes beside them would take memory bandwidth and cores from them.
    """

    eager = False

    def begin(self) -> None:
        """The tensors are as they shall be saved from here on."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around all copies of the save, in its thread."""
        with torch.no_grad():
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        """The point behind all copies so far."""
        return _Passed()

    def hold_update(self) -> None:
        """Let nothing that the training does from now on overtake the copies so far."""

    def device_stall(self) -> float:
        """Seconds that the device waited in `hold_update`."""
        return 0.0


class CudaCopier(HostCopier):
    """Copies from a GPU on a side stream.

    The side stream waits for what the compute stream had queued when `begin` was called; the compute stream waits
    for the copies only in `hold_update`, and the host for neither. `begin` and `hold_update` belong to the training's
    thread, the rest to the save's. Whoever calls `copy` keeps the source alive until a later mark has passed.
    """

    eager = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _stream(device)
        self._ready = _event()
        self._last: torch.cuda.Event | None = None
        self._stall: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self) -> None:
        self._last = None
        self._stall = None
        self._ready.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def scope(self) -> Iterator[None]:
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._side):
            self._side.wait_event(self._ready)
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = _event()
        event.record(self._side)
        self._last = event
        return event

    def hold_update(self) -> None:
        if self._last is None:
            return
        stream = torch.cuda.current_stream(self._device)
        before, after = _timer(), _timer()
        before.record(stream)
        stream.wait_event(self._last)
        after.record(stream)
        self._stall = (before, after)

    def device_stall(self) -> float:
        if self._stall is None:
            return 0.0
        before, after = self._stall
        after.synchronize()
        return before.elapsed_time(after) / 1000
