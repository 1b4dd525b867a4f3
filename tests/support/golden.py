"""Golden vectors: what a reference implementation computed for weights and inputs that anybody can make again.

An item is `<name>.json` (cases, tolerance) and, unless it is JSON only, `<name>.safetensors` (the sampled outputs).
Its folder comes from OSORA_GOLDEN_DIR, by default tests/golden, so that another set of the same format can be run
without touching a test: tests take all that they compare from the item, and nothing from a case's name. An item or a
tensor that is not there fails the test that asks for it; nothing is skipped.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

_MODULATION = re.compile(r"(?:^|\.)(?:lin|adaLN_modulation\.1)\.(?:weight|bias)$")


def golden_dir() -> Path:
    """The folder of the golden set in use."""
    return Path(os.environ.get("OSORA_GOLDEN_DIR") or Path(__file__).resolve().parents[1] / "golden")


def load_json(name: str) -> Any:
    """`<name>.json` of the golden set (also `manifests/<name>`). The file has to be there."""
    path = golden_dir() / f"{name}.json"
    if not path.is_file():
        raise AssertionError(f"golden item `{name}` is not in {golden_dir()}")
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def _tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.is_file() else {}


def load_item(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and tensors of an item; a JSON-only item has no tensors."""
    meta = load_json(name)
    meta["item"] = name
    return meta, _tensors(golden_dir() / f"{name}.safetensors")


def cases_of(name: str) -> list[Any]:
    """The item's cases as pytest parameters, each with the case's id. Reading happens at collection."""
    import pytest

    return [pytest.param(case, id=str(case["id"])) for case in load_json(name)["cases"]]


def seeded_randn(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal float32 on the CPU from a generator of its own."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def make_input(spec: Mapping[str, Any]) -> Tensor:
    """An input as a case states it: `{shape, seed}` and perhaps `post: "clamp(a,b)"`."""
    value = seeded_randn(spec["shape"], spec["seed"])
    post = spec.get("post")
    if post is None:
        return value
    bounds = re.fullmatch(r"clamp\((-?[\d.]+), ?(-?[\d.]+)\)", post)
    if bounds is None:
        raise AssertionError(f"golden input asks for `{post}`, which this helper does not know")
    return value.clamp(float(bounds[1]), float(bounds[2]))


def rule_tensor(key: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that the published rule gives to `key`: normal draws seeded by the key, scaled by the key's role."""
    shape = tuple(shape)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    draw = seeded_randn(shape, zlib.crc32(key.encode()))
    leaf = key.rpartition(".")[2]
    fan_in = max(1, draw.numel() // shape[0]) if shape else 1
    if leaf == "running_var":
        return draw.abs() * 0.1 + 1
    if leaf == "running_mean":
        return draw * 0.02
    if _MODULATION.search(key):
        return draw * (2.0 / math.sqrt(fan_in)) if len(shape) > 1 else draw * 0.5
    if len(shape) > 1:
        return draw * (0.5 / math.sqrt(fan_in))
    if len(shape) == 1 and leaf in ("weight", "scale"):
        return draw * 0.1 + 1
    return draw * 0.02


def fill_by_rule(module: nn.Module, prefix: str = "", rule: Callable[..., Tensor] = rule_tensor) -> nn.Module:
    """Give every parameter and buffer of the state dict its rule tensor, under the key `prefix + name`."""
    with torch.no_grad():
        for key, value in module.state_dict().items():
            value.copy_(rule(prefix + key, value.shape, value.dtype))
    return module


def assert_keys(expected: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]], module: nn.Module) -> None:
    """The module's state dict has exactly these keys and shapes, in this order."""
    want = {key: tuple(shape) for key, shape in dict(expected).items()}
    have = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    wrong = [f"missing {k} {s}" for k, s in want.items() if k not in have]
    wrong += [f"unexpected {k} {s}" for k, s in have.items() if k not in want]
    wrong += [f"{k} is {have[k]}, not {s}" for k, s in want.items() if k in have and have[k] != s]
    assert not wrong, "\n".join(wrong)
    assert list(have) == list(want), "same keys, in another order"


def golden_tensor(meta: Mapping[str, Any], output: Mapping[str, Any]) -> Tensor:
    """The stored samples of an output."""
    tensors = _tensors(golden_dir() / f"{meta['item']}.safetensors")
    if output["tensor"] not in tensors:
        raise AssertionError(f"{meta['item']} has no tensor `{output['tensor']}`")
    return tensors[output["tensor"]]


def assert_close(meta: Mapping[str, Any], output: Mapping[str, Any], got: Tensor, *, slack: float = 0.0) -> None:
    """`got` has the output's shape and, at the sampled positions, its values within the item's tolerance.

    The tolerance is `atol_rel_to_absmax` and `rtol` times the largest absolute value of the whole output, plus
    `atol`, plus 1e-7, as the golden set's own comparison has it; plus `slack`, for what hangs on the processor.
    """
    name = f"{meta['item']}: {output['tensor']}"
    want = golden_tensor(meta, output)
    assert list(got.shape) == list(output["shape"]), f"{name} has shape {list(got.shape)}, not {output['shape']}"
    sample = got.detach().cpu().double().reshape(-1)[:: output.get("stride", 1)]
    assert sample.numel() == want.numel(), f"{name} samples to {sample.numel()} values, not {want.numel()}"
    assert bool(torch.isfinite(sample).all()), f"{name} has values that are not finite"
    limits = output.get("tolerance") or meta.get("tolerance") or {}
    absmax = output["absmax"]
    relative = limits.get("atol_rel_to_absmax", 0.0) + limits.get("rtol", 0.0)
    limit = limits.get("atol", 0.0) + relative * absmax + 1e-7 + slack
    error = float((sample - want.double()).abs().max()) if want.numel() else 0.0
    assert error <= limit, f"{name} is off by {error:.3g}, allowed {limit:.3g} (largest value {absmax:.3g})"
