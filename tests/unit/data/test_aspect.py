from __future__ import annotations

import numpy as np
import pytest
from support.golden import load_json

from osora_cli.data.aspect import closest_ratios, image_size, resolve_resolution
from osora_cli.errors import ConfigError

GOLDEN = load_json("data_aspect")


@pytest.mark.parametrize("step", sorted(GOLDEN["tables"], key=int))
def test_training_tables_are_as_golden(step: str) -> None:
    for name, (pixels, sizes) in GOLDEN["tables"][step].items():
        resolution = resolve_resolution(name, int(step))
        assert resolution.pixels == pixels
        # The order counts: it decides between ratios that are equally close.
        assert [[ratio, list(size)] for ratio, size in resolution.sizes.items()] == sizes, name


@pytest.mark.parametrize("step", sorted(GOLDEN["inference"], key=int))
def test_inference_tables_are_as_golden(step: str) -> None:
    for name, sizes in GOLDEN["inference"][step].items():
        got = resolve_resolution(name, int(step), training=False).sizes
        assert [[ratio, list(size)] for ratio, size in got.items()] == sizes, name


def test_sizes_of_samples_are_as_golden() -> None:
    for key, size in GOLDEN["get_image_size"].items():
        name, ratio, step = key.split("|")
        assert list(image_size(name, ratio, int(step))) == size, key


def test_closest_ratios_are_as_golden() -> None:
    rows = GOLDEN["get_closest_ratio"]["rows"]
    assert len(rows) > 100
    for name, step, height, width, ratio in rows:
        sizes = resolve_resolution(name, step).sizes
        place = int(closest_ratios(np.array([height / width]), sizes)[0])
        assert list(sizes)[place] == ratio, (name, step, height, width)


def test_many_clips_get_the_ratio_each_would_get_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = resolve_resolution("768px", 16).sizes
    ratios = np.exp(rng.uniform(-1.2, 1.2, 500))
    alone = [int(closest_ratios(ratios[i : i + 1], sizes)[0]) for i in range(len(ratios))]
    assert closest_ratios(ratios, sizes).tolist() == alone


@pytest.mark.parametrize("name", sorted(GOLDEN["errors"]))
def test_what_the_reference_refuses_is_refused_with_the_value(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_resolution(name, 16)
    assert f"`{name}`" in caught.value.message
    assert caught.value.allowed


@pytest.mark.parametrize("name", ["0px", "-256px", "256", "256 px", "p", "256px_", "256px_ar", "px256", "256px_MAX"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_resolution(name, 16)


@pytest.mark.parametrize(
    ("name", "step", "size", "instead"),
    [
        ("256px_ar4:3", 32, "288x224", "256px_ar3:2"),
        ("256px_ar1.85:1", 16, "336x192", "256px_ar16:9"),
        ("64px_ar1:1", 32, "64x64", "64px_ar2:1"),
    ],
)
def test_a_ratio_that_collapsed_into_another_is_named_with_that_one(
    name: str, step: int, size: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_resolution(name, step)
    assert size in caught.value.message
    assert caught.value.hint == f"write `{instead}`"
    (got,) = resolve_resolution(instead, step).sizes.values()
    assert f"{got[1]}x{got[0]}" == size


@pytest.mark.parametrize("step", [1, 4, 8, 16, 32, 64])
def test_every_side_is_a_multiple_of_the_compression(step: int) -> None:
    for name in ("64px", "100px", "256px", "360p"):
        for height, width in resolve_resolution(name, step).sizes.values():
            assert height > 0
            assert width > 0
            assert height % step == width % step == 0


def test_a_resolution_smaller_than_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="room for no frame"):
        resolve_resolution("16px", 32)


def test_small_resolutions_keep_the_ratios_there_is_room_for() -> None:
    assert dict(resolve_resolution("32px", 32).sizes) == {"2.39:1": (32, 32), "1:2.39": (32, 32)}
