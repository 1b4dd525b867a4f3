"""Rotary embedding: what it must do whatever the layout, and how precise it is."""

from __future__ import annotations

import pytest
import torch
from support.golden import seeded_randn
from torch import Tensor

from osora_cli.model.mmdit.packing import image_ids
from osora_cli.model.mmdit.rope import apply_rope, rope_table

AXES = (4, 6, 6)
HEAD = sum(AXES)


def rotated(x_BLHD: Tensor, ids: Tensor, *, interleaved: bool) -> Tensor:
    return apply_rope(x_BLHD, rope_table(ids, AXES, 10000, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_relative_positions_only(interleaved: bool) -> None:
    ids = image_ids((2, 3, 4))
    q, k = (seeded_randn((1, 24, 2, HEAD), seed) for seed in (1, 2))
    shift = torch.tensor([5, 11, 3])
    scores = []
    for at in (ids, ids + shift):
        scores.append(torch.einsum("blhd,bmhd->bhlm", *(rotated(x, at, interleaved=interleaved) for x in (q, k))))
    assert torch.allclose(scores[0], scores[1], atol=2e-5)
    assert not torch.allclose(scores[0], torch.einsum("blhd,bmhd->bhlm", q, k), atol=0.1)


@pytest.mark.parametrize("interleaved", [True, False])
def test_origin_changes_nothing_and_lengths_are_kept(interleaved: bool) -> None:
    x = seeded_randn((1, 6, 2, HEAD), 3)
    assert torch.equal(rotated(x, torch.zeros(1, 6, 3), interleaved=interleaved), x)
    turned = rotated(x, image_ids((1, 2, 3)) + 7, interleaved=interleaved)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_layouts_are_one_rotation_in_two_channel_orders() -> None:
    order = torch.tensor([*range(0, HEAD, 2), *range(1, HEAD, 2)])
    x, ids = seeded_randn((1, 30, 2, HEAD), 4), image_ids((2, 3, 5))
    half = rotated(x[..., order], ids, interleaved=False)
    assert torch.allclose(half, rotated(x, ids, interleaved=True)[..., order], atol=1e-5)
    assert not torch.allclose(rotated(x, ids, interleaved=False), rotated(x, ids, interleaved=True), atol=0.1)


def test_first_pairs_by_hand() -> None:
    """Position 3 on the first axis alone: pair 0 turns by 3 rad, pair 1 by 3 / 100 (theta^(-2/4))."""
    x = torch.zeros(1, 1, 1, HEAD)
    x[..., 0] = x[..., 2] = 1.0
    out = rotated(x, torch.tensor([[[3, 0, 0]]]), interleaved=True).flatten()
    want = torch.tensor([3.0, 0.03]).cos(), torch.tensor([3.0, 0.03]).sin()
    assert torch.allclose(out[[0, 2]], want[0])
    assert torch.allclose(out[[1, 3]], want[1])


def test_each_sample_has_its_own_positions() -> None:
    x = seeded_randn((1, 6, 2, HEAD), 5).expand(2, -1, -1, -1)
    ids = torch.cat([image_ids((1, 2, 3)), image_ids((1, 2, 3)) + 9])
    out = rotated(x, ids, interleaved=False)
    assert torch.equal(out[1:], rotated(x[1:], ids[1:], interleaved=False))
    assert not torch.allclose(out[0], out[1], atol=0.1)


@pytest.mark.parametrize(("interleaved", "error"), [(True, 1e-7), (False, 2e-3)])
def test_angles_of_far_positions(interleaved: bool, error: float) -> None:
    """fp64 angles round only once; fp32 angles of some thousand rad are good to about 1e-4 of a turn."""
    ids = torch.tensor([[[4000, 3001, 2999]]])
    table = rope_table(ids, AXES, 10000, interleaved=interleaved)
    exact = torch.cat(
        [ids[..., n, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d) for n, d in enumerate(AXES)],
        dim=-1,
    )
    assert float((table.cos_BLK.double() - exact.cos()).abs().max()) < error
    assert float((table.sin_BLK.double() - exact.sin()).abs().max()) < error


def test_integer_positions_stay_apart_where_bfloat16_merges_them() -> None:
    ids = torch.tensor([[[0, 256, 0], [0, 257, 0]]])
    integers = rope_table(ids, AXES, 10000, interleaved=False).cos_BLK
    assert not torch.equal(integers[:, 0], integers[:, 1])
    halves = rope_table(ids.bfloat16(), AXES, 10000, interleaved=False).cos_BLK
    assert torch.equal(halves[:, 0], halves[:, 1])


@pytest.mark.parametrize("interleaved", [True, False])
def test_half_precision_input_is_rotated_in_fp32_and_rounded_once(interleaved: bool) -> None:
    x, ids = seeded_randn((1, 6, 2, HEAD), 6).bfloat16(), image_ids((1, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        table = rope_table(ids, AXES, 10000, interleaved=interleaved)
        out = apply_rope(x, table)
    assert table.cos_BLK.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert torch.equal(table.cos_BLK, rope_table(ids, AXES, 10000, interleaved=interleaved).cos_BLK)
    assert torch.equal(out, rotated(x.float(), ids, interleaved=interleaved).bfloat16())
