"""Updates that changed nothing because their gradients were not finite: counted on the device, by network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from osora_cli.engine.base import UpdateResult

_NAME = "skipped_updates"


def skips_in(state: Mapping[str, object] | None) -> dict[str, int]:
    """The counts that a checkpoint holds, as `Skips.counts` gave them."""
    return {key: int(value) for key, value in (state or {}).items() if key.startswith(_NAME) and isinstance(value, int)}


class Skips:
    """Counts of a run.

    Args:
        networks: names of the trained networks; the first is `model`.
        before: counts that the run goes on from, by the names that `counts` gives them.
    """

    def __init__(self, networks: Iterable[str], before: Mapping[str, int], device: torch.device) -> None:
        self._keys = {n: _NAME if n == "model" else f"{_NAME}_{n}" for n in networks}
        self._total = {n: torch.full((), float(before.get(key, 0)), device=device) for n, key in self._keys.items()}
        self._in_row = torch.zeros((), device=device)

    def add(self, results: Mapping[str, UpdateResult]) -> None:
        """Count one update. Nothing waits for the device."""
        for name, result in results.items():
            self._total[name] += result.skipped
        worst = torch.stack([result.skipped for result in results.values()]).max()
        self._in_row = (self._in_row + 1) * worst

    def counts(self) -> dict[str, int]:
        """`skipped_updates` of the first network, `skipped_updates_NAME` of others. Waits for the device."""
        values = torch.stack(list(self._total.values())).tolist()
        return {key: int(value) for key, value in zip(self._keys.values(), values, strict=True)}

    def in_row(self) -> int:
        """How many updates in a row, up to the last one, were skipped for one network or more. Waits for the device."""
        return int(self._in_row.item())
