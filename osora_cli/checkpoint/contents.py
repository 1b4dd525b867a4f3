"""What the trainer hands over for one checkpoint, and how its tensors are named in files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.layout import GROUPS, SMALL_NAMES
from osora_cli.checkpoint.plan import Part, PlanError, TensorSpec
from osora_cli.tensors import TensorShard, plain_key

__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "CheckpointContents", "Counters", "file_key", "local_specs", "merge_specs"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass
class CheckpointContents:
    """The state of a run at an update boundary.

    Attributes:
        counters: as they go into running_states.json.
        sharded: this rank's tensors by group: any of "model", "optimizer", "ema", "master", "discriminator",
            "disc_optimizer", "disc_master". Optimizer keys are `state.{i}.{name}`, with `step` as an F32 0-d tensor.
        param_groups: for "optimizer" and "disc_optimizer" the optimizer's groups: plain values, `params` as numbers.
        small: state dicts of plain values for "lr_scheduler", "sampler", "disc_lr_scheduler".
        rng: this rank's generator states, as JSON takes them.
        provenance: what the manifest is to say of the run. `promised_parts` (a list of group and small names) is held
            against the contents before anything is written.
    """

    counters: Counters
    sharded: dict[str, list[TensorShard]]
    param_groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    small: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what could not be resumed from.

        Raises:
            PlanError: an unknown group or state, an optimizer without its groups, a promised part that is not here.
        """
        for names, known, what in (
            (self.sharded, tuple(GROUPS), "group of tensors"),
            (self.small, SMALL_NAMES, "small state"),
        ):
            for name in names:
                if name not in known:
                    raise PlanError(f"there is no {what} named `{name}`; known are {', '.join(known)}")
        for name, layout in GROUPS.items():
            if layout.optimizer and name in self.sharded and name not in self.param_groups:
                raise PlanError(f"`{name}` comes without its parameter groups")
        lacking = sorted(set(self.provenance.get("promised_parts", [])) - set(self.parts))
        if lacking:
            raise PlanError(f"the run promises {', '.join(f'`{name}`' for name in lacking)}, but hands nothing over")

    @property
    def parts(self) -> list[str]:
        return [*(name for name in GROUPS if name in self.sharded), *(n for n in SMALL_NAMES if n in self.small)]


def file_key(group: str, key: str) -> str:
    """A shard's key without what wrappers add to it; an optimizer's keys are numbers and stay."""
    return key if GROUPS[group].optimizer else plain_key(key)


LocalSpec = tuple[str, str, tuple[int, ...], int, int]


def local_specs(group: str, shards: Iterable[TensorShard]) -> list[LocalSpec]:
    """(key, dtype, shape, first element, count) of each shard of this rank: plain values that ranks can exchange.

    Raises:
        PlanError: a dtype that safetensors has no name for.
    """
    specs = []
    for shard in shards:
        if shard.dtype not in DTYPE_NAMES:
            raise PlanError(f"`{shard.key}` has dtype {shard.dtype}, which a safetensors file cannot hold")
        key = file_key(group, shard.key)
        specs.append((key, DTYPE_NAMES[shard.dtype], tuple(shard.shape), shard.start, shard.tensor.numel()))
    return specs


def merge_specs(group: str, ranks: list[list[LocalSpec]]) -> list[TensorSpec]:
    """The tensors of a group from what each rank holds of them, in the order of the lowest rank that has them.

    Raises:
        PlanError: ranks that give one tensor different dtypes or shapes, or a rank that names one twice.
    """
    parts: dict[str, list[Part]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, specs in enumerate(ranks):
        seen: set[tuple[str, int]] = set()
        for key, dtype, shape, start, count in specs:
            kind = kinds.setdefault(key, (dtype, tuple(shape)))
            if kind != (dtype, tuple(shape)):
                raise PlanError(
                    f"`{key}` of `{group}` is {dtype}{list(shape)} on rank {rank}, {kind[0]}{list(kind[1])} before"
                )
            if (key, start) in seen and count:
                raise PlanError(f"two tensors of `{group}` are named `{key}`")
            seen.add((key, start))
            parts.setdefault(key, []).append(Part(rank, start, count))
    return [TensorSpec(key, *kinds[key], tuple(held)) for key, held in parts.items()]
