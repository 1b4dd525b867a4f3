"""Tensor helpers that engine and checkpoint share, and that belong to neither."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

# Wrappers put their own level into the names of a state dict; files carry the plain names.
_WRAPPER_LEVELS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class TensorShard:
    """One rank's part of one tensor: the elements [start, start + tensor.numel()) in row-major order.

    Attributes:
        key: name in the file, without any wrapper's prefix.
        shape: shape of the whole tensor.
        start: index of the first element that this rank holds, counted in the whole tensor's row-major order.
        tensor: the local elements, on any device and in any memory format. For a whole tensor (`start` 0 and as
            many elements as `shape`) it may have that shape; row-major order is made when it is staged.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if self.start < 0 or self.start + self.tensor.numel() > self.numel:
            end = self.start + self.tensor.numel()
            raise ValueError(f"shard of `{self.key}` covers elements {self.start}..{end} of {self.numel}")

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == self.numel

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> TensorShard:
        return cls(key, tuple(tensor.shape), 0, tensor)


def plain_key(name: str) -> str:
    """Drop the levels that wrappers add, wherever they stand: `module._orig_mod.encoder.weight` -> `encoder.weight`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_LEVELS)
