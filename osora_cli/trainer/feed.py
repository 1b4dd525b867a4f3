"""Where the loop gets its batches from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from osora_cli.data.loader import ClipBatch


class Feed(Protocol):
    """The table seen as epochs of batches, for this rank."""

    @property
    def start_step(self) -> int:
        """Micro-batches of this rank that are done in the first epoch."""

    def steps(self, epoch: int) -> int:
        """Micro-batches in an epoch; epochs may differ."""

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        """The batches of an epoch from `step` on."""

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """The position for a checkpoint, in samples."""

    def close(self) -> None:
        """End what reads."""
