"""Latents to tokens and back."""

from __future__ import annotations

import pytest
import torch
from support.golden import seeded_randn

from osora_cli.config.models.flux import patch_grid
from osora_cli.errors import ConfigError
from osora_cli.model.mmdit.packing import image_ids, make_tokens, pack, pack_condition, text_ids, unpack


def test_order_of_tokens_and_features() -> None:
    x = torch.arange(32).view(1, 2, 1, 4, 4)
    tokens = pack(x, 2)
    assert tokens.shape == (1, 4, 8)
    assert tokens[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]
    assert pack(x, 1)[0, 1].tolist() == [1, 17]


@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 5), (2, 4, 1)])
def test_unpack_undoes_pack_and_ids_follow_the_tokens(patch: int, grid: tuple[int, int, int]) -> None:
    frames, rows, columns = grid
    x = seeded_randn((2, 3, frames, rows * patch, columns * patch), 1)
    tokens = pack(x, patch)
    assert patch_grid((frames, rows * patch, columns * patch), patch) == grid
    assert torch.equal(unpack(tokens, grid, patch), x)
    for index, (t, i, j) in enumerate(image_ids(grid)[0].tolist()):
        window = x[:, :, t, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
        assert torch.equal(tokens[:, index], window.flatten(1))


def test_ids_are_exact_integers() -> None:
    ids = image_ids((1, 1, 300), batch_size=2)
    assert ids.shape == (2, 300, 3)
    assert not ids.is_floating_point()
    assert ids[1, 299].tolist() == [0, 0, 299]
    assert text_ids(5, 2).shape == (2, 5, 3)
    assert not text_ids(5, 2).any()


@pytest.mark.parametrize("size", [(2, 5, 4), (2, 4, 5)])
def test_a_latent_that_does_not_divide_is_refused_with_its_size(size: tuple[int, int, int]) -> None:
    for call in (lambda: patch_grid(size, 2), lambda: pack(torch.zeros(1, 4, *size), 2)):
        with pytest.raises(ConfigError, match=f"`{size[1]}` x `{size[2]}`") as error:
            call()
        assert "multiples of 2" in str(error.value)


def test_condition_begins_with_the_mask_and_hides_what_is_not_given() -> None:
    latent = seeded_randn((2, 3, 4, 4, 6), 2)
    mask = torch.zeros(2, 1, 4, 4, 6)
    mask[:, :, 0] = 1
    packed = pack_condition(mask, latent, 2)
    assert packed.shape == (2, 4 * 2 * 3, 4 * (1 + 3))
    given = image_ids((4, 2, 3))[0, :, 0] == 0
    assert (packed[:, given, :4] == 1).all()
    assert torch.equal(packed[:, given, 4:], pack(latent, 2)[:, given])
    assert not packed[:, ~given].any()
    assert pack_condition(mask.bool(), latent.bfloat16(), 2).dtype == torch.bfloat16


def test_one_text_serves_the_batch_in_the_latents_dtype() -> None:
    latent = seeded_randn((3, 4, 2, 4, 6), 3).bfloat16()
    tokens = make_tokens(latent, seeded_randn((1, 5, 8), 4), seeded_randn((3, 6), 5), 2)
    assert tokens.grid == (2, 2, 3)
    assert tokens.txt.shape == (3, 5, 8)
    assert tokens.txt.dtype == tokens.y_vec.dtype == torch.bfloat16
    assert tokens.txt_ids.shape == (3, 5, 3)
    assert tokens.img_ids.shape == (3, 12, 3)
    assert torch.equal(unpack(tokens.img, tokens.grid, 2), latent)
    with pytest.raises(ValueError, match="txt holds 2 samples for a batch of 3"):
        make_tokens(latent, seeded_randn((2, 5, 8), 4), seeded_randn((3, 6), 5), 2)
