"""Values of one update, gathered on the device and read once, when the update is logged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import Engine, UpdateResult


@dataclass
class Meter:
    """Collects from the first micro-batch of an update to its optimizer step.

    Attributes:
        data_wait: seconds spent waiting for batches, this update.
        rows: table rows of the update's clips, in order.
        frames: frames that went through the network.
    """

    data_wait: float = 0.0
    rows: list[int] = field(default_factory=list)
    frames: int = 0
    _values: dict[str, torch.Tensor] = field(default_factory=dict)
    _micro_batches: int = 0
    _started: float = field(default_factory=time.perf_counter)

    def add(self, batch: ClipBatch, values: dict[str, torch.Tensor]) -> None:
        self.data_wait += batch.wait_s
        self.rows += [int(r) for r in batch.rows]
        self.frames += batch.video.shape[0] * batch.video.shape[2]
        self._micro_batches += 1
        for name, value in values.items():
            value = value.to(torch.float32)
            self._values[name] = self._values[name] + value if name in self._values else value

    def read(self, engine: Engine, results: dict[str, UpdateResult]) -> dict[str, Any]:
        """Means over the update's micro-batches and ranks, and each network's gradient norm: the one host sync.

        `samples` are the rows of all ranks, rank after rank; all ranks call it.
        """
        names = list(self._values)
        norms = {("grad_norm" if name == "model" else f"grad_norm_{name}"): r.grad_norm for name, r in results.items()}
        means = torch.stack([self._values[n] for n in names]) / self._micro_batches
        if engine.world_size > 1:
            own = torch.tensor([self.data_wait, float(self.frames)], device=means.device)
            means = torch.cat([means, own])
            names = [*names, "data_wait_s", "frames"]
        packed = torch.cat([engine.mean_over_ranks(means), torch.stack(list(norms.values()))])
        numbers = dict(zip([*names, *norms], packed.tolist(), strict=True))
        seconds = time.perf_counter() - self._started
        wait = numbers.pop("data_wait_s", self.data_wait)
        frames = round(numbers.pop("frames") * engine.ranks.data_replicas) if "frames" in numbers else self.frames
        return {
            "loss": numbers.pop("loss"),
            **numbers,
            "samples": engine.ranks.gather_numbers(self.rows if engine.rank % engine.ranks.sequence == 0 else []),
            "step_s": round(seconds, 6),
            "data_wait_s": round(wait, 6),
            "frames_per_s": round(frames / seconds, 3) if seconds > 0 else None,
        }
