"""Ranks that share a sample's tokens give what one rank gives (gloo, CPU)."""

from __future__ import annotations

import pytest
from support.distributed import RankServer
from support.states import assembled, assert_near

from osora_cli.engine.sequence import check_heads, part_sizes
from osora_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "world_size", "stage"), [("mmdit-four-heads", 2, 2), ("mmdit-four-heads", 2, 0), ("mmdit", 3, 3)]
)
def test_shared_tokens_give_the_losses_and_gradients_of_one_rank(
    ranks: RankServer, kind: str, world_size: int, stage: int
) -> None:
    """30 image and 7 text tokens: neither divides by 2 and 3 both."""
    expected = ranks.run(1, "alike", kind, "none", "fp32", 3, stage)[0]
    parts = ranks.run(world_size, "alike", kind, "hybrid", "fp32", 3, stage)
    for got in parts:
        assert got["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
        assert got["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5)
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert_near(assembled([p["moment"] for p in parts]), assembled([expected["moment"]]), 1e-5)


def test_bf16_over_shared_tokens(ranks: RankServer) -> None:
    expected = ranks.run(1, "alike", "mmdit-four-heads", "none", "bf16", 2, 2)[0]
    for got in ranks.run(2, "alike", "mmdit-four-heads", "hybrid", "bf16", 2, 2):
        assert got["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert got["norms"] == pytest.approx(expected["norms"], rel=2e-2)


def test_parts_are_even() -> None:
    assert part_sizes(7, 3) == [3, 2, 2]
    assert part_sizes(2, 4) == [1, 1, 0, 0]


def test_heads_that_cannot_be_shared_out() -> None:
    check_heads(24, 4)
    with pytest.raises(ConfigError, match="24 attention heads cannot be shared out evenly"):
        check_heads(24, 5)
