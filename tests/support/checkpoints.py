"""Small checkpoints for tests: all values follow from the update's number, so any file can be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.tensors import TensorShard

# Sizes that no number of ranks divides, a tensor smaller than the ranks, one of no elements, one without dimensions.
SHAPES: dict[str, tuple[int, ...]] = {
    "encoder.conv.weight": (13, 5, 3, 3, 3),
    "encoder.conv.bias": (13,),
    "mid.weight": (61, 47),
    "mid.empty": (0, 4),
    "decoder.scale": (2,),
    "decoder.weight": (37, 129),
    "logit": (),
}


def weights(update: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + update)
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in SHAPES.items()}


def optimizer_state(update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2000 + update)
    state = {}
    for number, shape in enumerate(SHAPES.values()):
        state[f"state.{number}.exp_avg"] = torch.randn(shape, generator=generator)
        state[f"state.{number}.exp_avg_sq"] = torch.rand(shape, generator=generator)
        state[f"state.{number}.step"] = torch.tensor(float(update))
    return state


def tensors(update: int) -> dict[str, dict[str, torch.Tensor]]:
    """Group -> key -> tensor of a bf16 run with EMA."""
    return {
        "model": {**weights(update, torch.bfloat16), "num_batches": torch.tensor(update)},
        "optimizer": optimizer_state(update),
        "ema": weights(update + 500),
        "master": weights(update),
    }


def whole(table: dict[str, torch.Tensor]) -> list[TensorShard]:
    return [TensorShard.whole(key, tensor) for key, tensor in table.items()]


def contents(update: int, *, epoch: int = 0, groups: dict[str, list[TensorShard]] | None = None) -> CheckpointContents:
    return CheckpointContents(
        counters=Counters(epoch, update * 2, update * 2, None, update),
        sharded=groups if groups is not None else {name: whole(table) for name, table in tensors(update).items()},
        param_groups={"optimizer": [{"lr": 1e-4 * update, "betas": (0.9, 0.98), "params": list(range(len(SHAPES)))}]},
        small={"lr_scheduler": {"last_epoch": update}, "sampler": {"seed": 42, "epoch": epoch, "position": update * 8}},
        rng={"torch": [update, 1, 2]},
        provenance={"engine": "native", "run_id": "r1", "promised_parts": ["model", "optimizer", "ema", "master"]},
    )


def save(run: Path, *updates: int, async_io: bool = True, **options: Any) -> list[Path]:
    """Save these updates one after the other with one store; returns the folders."""
    store = CheckpointStore(run, async_io=async_io, **options)
    try:
        for update in updates:
            store.save(contents(update))
            store.before_update()
        store.finish()
    finally:
        store.close()
    return [run / f"epoch0-global_step{update}" for update in updates]
