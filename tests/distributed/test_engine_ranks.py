"""Several processes against one with the same global batch: losses, gradients, weights (gloo, CPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.distributed import RankServer
from support.states import assembled, assert_near

PLUGINS = ["ddp", "zero1", "zero2", "zero3"]
_alone: dict[tuple[Any, ...], Any] = {}


def alone(ranks: RankServer, *order: Any) -> Any:
    """What one process gives, computed once."""
    if order not in _alone:
        name, *args = order
        _alone[order] = ranks.run(1, name, *args)[0]
    return _alone[order]


@pytest.mark.parametrize(
    ("kind", "plugin", "world_size"),
    [
        *((kind, plugin, 2) for kind in ("dc_ae", "mmdit") for plugin in PLUGINS),
        *(("dc_ae", plugin, 3) for plugin in ("zero1", "zero2")),
        *(("mmdit", plugin, 3) for plugin in ("ddp", "zero3")),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: RankServer, kind: str, plugin: str, world_size: int
) -> None:
    expected = alone(ranks, "train", kind, "none", "fp32", 5)
    for got in ranks.run(world_size, "train", kind, plugin, "fp32", 5):
        assert got["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
        assert got["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5)
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    first = alone(ranks, "one_update", kind, "none", "fp32", 1)
    parts = ranks.run(world_size, "one_update", kind, plugin, "fp32", 1)
    assert_near(assembled([p["moment"] for p in parts]), assembled([first["moment"]]), 1e-5)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_micro_batches_without_traffic_add_up(ranks: RankServer, plugin: str) -> None:
    whole = alone(ranks, "one_update", "dc_ae", "none", "fp32", 1)
    parts = ranks.run(2, "one_update", "dc_ae", plugin, "fp32", 3)
    assert parts[0]["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    assert_near(assembled([p["moment"] for p in parts]), assembled([whole["moment"]]), 1e-5)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_bf16_gradients_are_reduced_and_added_in_fp32(ranks: RankServer, plugin: str) -> None:
    """The same six clips one by one: only what bf16 compute rounds may differ, and that is the same on both sides."""
    whole = alone(ranks, "one_update", "mmdit", "none", "bf16", 6)
    parts = ranks.run(2, "one_update", "mmdit", plugin, "bf16", 3)
    got, expected = assembled([p["moment"] for p in parts]), assembled([whole["moment"]])
    assert all(t.dtype is torch.float32 for t in got.values())
    assert_near(got, expected, 2e-6 if plugin in ("ddp", "zero1") else 2e-2)


@pytest.mark.sweep
@pytest.mark.parametrize("plugin", ["zero2", "zero3"])
def test_shards_in_a_group_and_copies_between_groups(ranks: RankServer, plugin: str) -> None:
    expected = alone(ranks, "train", "dc_ae", "none", "fp32", 3, 8)
    for got in ranks.run(4, "train", "dc_ae", plugin, "fp32", 3, 8, replicate=2):
        assert got["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
        assert got["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5)
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-4)
