"""Counting where the host would wait for a GPU, on a machine without one."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Python's own ways to a tensor's values that are no operator. All others end in one of the operators.
_READING = {"tolist", "cpu", "numpy", "__array__"}
_READING_OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostReads:
    """Counts what reads a tensor's values while it is on. On a GPU each would wait for all that was issued before.

    Attributes:
        places: of each read, the innermost lines of code.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._modes = (_Functions(self), _Operators(self))

    def note(self, name: str) -> None:
        frames = [f for f in traceback.extract_stack() if "osora_cli" in f.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        self.places.append(f"{name} at {where}")

    def __enter__(self) -> HostReads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Functions(TorchFunctionMode):
    """Python's own calls: some of them never reach an operator on the CPU."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            self._reads.note(name)
        elif name == "tensor" and (kwargs or {}).get("device") is not None:
            self._reads.note("torch.tensor on a device")  # a copy from memory that is not page-locked
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """What torch's own parts do inside (the backward, the optimizer)."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READING_OPERATORS or (name in _INDEXING and _has_mask(args[1])):
            self._reads.note(f"aten.{name}")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    """Whether the size of what is taken hangs on values."""
    return any(i is not None and i.dtype is torch.bool for i in indices)
