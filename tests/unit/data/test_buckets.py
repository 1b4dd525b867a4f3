from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.counting import count_calls
from support.golden import load_json

from osora_cli.data import buckets as module
from osora_cli.data.aspect import resolve_resolution
from osora_cli.data.buckets import BucketTable, LeftOut
from osora_cli.data.fps import map_target_fps
from osora_cli.errors import ConfigError

GOLDEN = load_json("data_bucket_id")["configs"]
MIXED: dict[str, Any] = {
    "256px": {1: (0.5, 45), 33: (1.0, 12), 65: (0.5, 6), 129: ((1.0, 0.33), 3)},
    "768px": {1: (0.5, 13), 33: (0.25, 2)},
}


def _config(item: dict[str, Any]) -> dict[str, dict[int, Any]]:
    config = item["config"]
    if isinstance(config, str):
        config = load_json("config_resolved")["configs"][f"configs/{config}"]["json"]["bucket_config"]
    return {name: {int(frames): entry for frames, entry in lengths.items()} for name, lengths in config.items()}


def _columns(rows: list[list[Any]]) -> tuple[NDArray[Any], ...]:
    frames, height, width = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return frames, height, width, np.array([float(row[3]) for row in rows])


def _name(table: BucketTable, bucket_id: int) -> list[Any] | None:
    bucket = table.buckets[bucket_id]
    return None if bucket_id < 0 else [bucket.resolution, bucket.frames, bucket.ratio]


# -- golden ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GOLDEN))
def test_buckets_are_as_golden(name: str) -> None:
    item = GOLDEN[name]
    table = BucketTable(_config(item), item["D"])
    assert len(table) == item["num_bucket"]
    for *clip, seed, fps_max, wanted in item["rows"]:
        got = table.assign(*_columns([clip]), fps_max=fps_max, seed=seed)
        assert _name(table, int(got[0])) == wanted, clip


@pytest.mark.parametrize("name", list(GOLDEN))
def test_sizes_and_batch_sizes_are_as_golden(name: str) -> None:
    item = GOLDEN[name]
    table = BucketTable(_config(item), item["D"])
    found = {(b.resolution, b.frames, b.ratio): ([b.frames, b.height, b.width], b.batch_size) for b in table.buckets}
    for resolution, frames, ratio, shape, batch_size in item["thw_bs_sample"]:
        assert found[resolution, frames, ratio] == (shape, batch_size)


def test_clips_in_a_table_draw_from_seeds_that_are_a_table_apart() -> None:
    """The rows of a table, spaced by the number of buckets, and those of single clips agree, over chunks too."""
    item = GOLDEN["custom:tuple_probs"]
    table = BucketTable(_config(item), item["D"])
    rows = [row[:4] for row in item["rows"]] * 3
    together = table.assign(*_columns(rows), fps_max=24, seed=11)
    alone = [table.assign(*_columns([row]), fps_max=24, seed=11 + i * len(table))[0] for i, row in enumerate(rows)]
    assert together.tolist() == alone


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BucketTable(MIXED, 16)
    columns = _columns(_many(700))
    whole = table.assign(*columns, fps_max=16, seed=3)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert (table.assign(*columns, fps_max=16, seed=3) == whole).all()


def test_big_seeds_are_those_of_numpy() -> None:
    table = BucketTable({"256px": {1: (0.5, 1)}}, 16)
    columns = _columns([[1, 512, 512, math.nan]] * 50)
    for seed in (2**32 - 5, 2**63):
        got = table.assign(*columns, fps_max=16, seed=seed) >= 0
        assert got.tolist() == [np.random.default_rng(seed + i * len(table)).random() < 0.5 for i in range(50)]
    with pytest.raises(ConfigError, match="too large"):
        table.assign(*columns, fps_max=16, seed=2**64 - 10)


# -- against the rule, row by row --------------------------------------------------------------------------------------


def _many(count: int, seed: int = 0) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    frames = np.where(rng.random(count) < 0.3, 1, rng.integers(1, 400, count))
    fps = rng.choice([8.0, 16.0, 23.976, 24.0, 29.97, 60.0, 120.0, math.nan], count)
    sides = np.exp(rng.uniform(np.log(150), np.log(2200), (count, 2))).astype(int)
    return [[int(f), int(h), int(w), float(r)] for f, (h, w), r in zip(frames, sides, fps, strict=True)]


def _by_rule(config: dict[str, Any], clip: list[Any], seed: int, fps_max: float, step: int) -> list[Any] | None:
    """Algorithms, part 6, word by word."""
    frames, height, width, fps = clip
    rng = np.random.default_rng(seed)
    used = frames // map_target_fps(fps, fps_max)[1]
    for name in sorted(config, key=lambda key: resolve_resolution(key, step).pixels, reverse=True):
        resolution = resolve_resolution(name, step)
        if height * width < 0.8 * resolution.pixels:
            continue
        nominal = {ratio: float(ratio.split(":")[1]) / float(ratio.split(":")[0]) for ratio in resolution.sizes}
        ratio = min(nominal, key=lambda key: abs(height / width - nominal[key]))
        if used == 1:
            if 1 in config[name] and rng.random() < config[name][1][0]:
                return [name, 1, ratio]
            continue
        for length in sorted(config[name], reverse=True):
            chance = config[name][length][0]
            if used < length or length == 1:
                continue
            if isinstance(chance, tuple):
                chance, skip = chance
                if skip >= 1 or rng.random() <= skip:
                    continue
            if chance >= 1 or rng.random() <= chance:
                return [name, length, ratio]
            break
    return None


@pytest.mark.parametrize(
    "config",
    [
        MIXED,
        {"256px": {1: (0.9, 1), 17: ((0.5, 0.5), 1), 33: ((0.7, 0.2), 1), 65: (0.3, 1)}, "360p": {9: ((0.9, 1.0), 1)}},
        {"512px_ar1:1": {5: (0.0, 1), 9: ((1.0, 0.0), 1)}, "256px_max": {1: (0.0, 1), 3: (0.4, 1)}},
    ],
)
def test_any_config_follows_the_rule(config: dict[str, Any]) -> None:
    clips = _many(600, seed=5)
    for step, fps_max in ((16, 24), (32, 16)):
        table = BucketTable(config, step)
        got = table.assign(*_columns(clips), fps_max=fps_max, seed=99)
        for i, clip in enumerate(clips):
            seed = 99 + i * len(table)
            assert _name(table, int(got[i])) == _by_rule(config, clip, seed, fps_max, step), clip


def test_without_probabilities_no_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SeededUniform", None)
    table = BucketTable({"256px": {33: (1.0, 1), 65: ((1.0, 1.0), 1)}, "512px": {17: (1.0, 1)}}, 16)
    got = table.assign(*_columns(_many(500)), fps_max=24, seed=0)
    assert (got >= 0).any()
    # Reaching a probability below 1 is not enough either: a clip has to be long and large enough to draw.
    table = BucketTable({"256px": {33: (1.0, 1)}, "4000px": {17: (0.5, 1)}}, 16)
    assert (table.assign(*_columns(_many(500)), fps_max=24, seed=0) >= 0).any()


# -- work for a big table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"256px": {1: (1.0, 8), 33: (1.0, 2), 65: (1.0, 1)}}, MIXED])
def test_python_does_no_work_for_each_row(config: dict[str, Any]) -> None:
    """Sixteen times the rows cost a few calls more, for the chunks they are handled in (speed: tests/benchmarks)."""
    rng = np.random.default_rng(1)
    table = BucketTable(config, 16)

    def calls(rows: int) -> int:
        sides = rng.integers(100, 2000, (2, rows))
        columns = (rng.integers(1, 400, rows), *sides, rng.choice([24.0, 30.0, 60.0, math.nan], rows))

        def work() -> None:
            ids = table.assign(*columns, fps_max=24, seed=7)
            assert ((ids < 0) == (table.left_out(ids, *columns, fps_max=24) > 0)).all()

        return count_calls(work)

    few = calls(16_384)
    assert calls(16 * 16_384) < few + 4 * 1000


# -- reasons -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "reason", "words"),
    [
        ([240, 144, 176, 24.0], LeftOut.TOO_SMALL, "`256px` needs 52429 pixels, it has 25344"),
        ([64, 720, 1280, 60.0], LeftOut.TOO_SHORT, "64 frames at 60 fps, used every 4 frames (fps_max 16): 16 frames"),
        ([32, 256, 256, 16.0], LeftOut.TOO_SHORT, "`256px` needs 33 frames, it has 32"),
        ([1, 512, 512, math.nan], LeftOut.NO_STILLS, "`256px` takes no single frames"),
        ([8, 512, 512, 120.0], LeftOut.NO_STILLS, "8 frames at 120 fps, used every 8 frames (fps_max 16): 1 frame,"),
        ([99, 512, 512, 8.0], LeftOut.PROBABILITY, "`256px` draws by probability"),
        ([2, 512, 512, 60.0], LeftOut.TOO_SHORT, "0 frames"),
    ],
)
def test_a_clip_in_no_bucket_has_a_reason(clip: list[Any], reason: LeftOut, words: str) -> None:
    table = BucketTable({"256px": {33: (0.0, 1), 65: (0.0, 1)}, "1080p": {17: (1.0, 1)}}, 16)
    columns = _columns([clip])
    ids = table.assign(*columns, fps_max=16, seed=0)
    assert ids.tolist() == [-1]
    assert table.left_out(ids, *columns, fps_max=16).tolist() == [reason]
    assert words in table.explain(*clip, fps_max=16)


def test_reasons_agree_with_what_certain_probabilities_would_do() -> None:
    """A clip is left out by probability exactly when it would be taken if every probability were 1."""
    sure = {"256px": {1: (1.0, 1), 33: (1.0, 1)}, "768px": {33: (1.0, 1)}}
    never = {name: dict.fromkeys(lengths, (0.0, 1)) for name, lengths in sure.items()}
    columns = _columns(_many(2000, seed=8))
    taken = BucketTable(sure, 16).assign(*columns, fps_max=24, seed=0) >= 0
    table = BucketTable(never, 16)
    ids = table.assign(*columns, fps_max=24, seed=0)
    assert (ids < 0).all()
    assert ((table.left_out(ids, *columns, fps_max=24) == LeftOut.PROBABILITY) == taken).all()


# -- configs that are wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no bucket"),
        ({"256px": {}}, "has no bucket"),
        ({"256": {1: (1.0, 1)}}, "`256`"),
        ({"256px": {0: (1.0, 1)}}, "`0` is not a number of frames"),
        ({"256px": {"33": (1.0, 1)}}, "`33` is not a number of frames"),
        ({"256px": {33: 1.0}}, "`1.0` is not a pair"),
        ({"256px": {33: (1.0, 0)}}, "`0` is not a batch size"),
        ({"256px": {33: (1.0, None)}}, "`None` is not a batch size"),
        ({"256px": {33: (-0.5, 1)}}, "`-0.5` is not a probability"),
        ({"256px": {33: ((0.5,), 1)}}, "is not a probability"),
        ({"256px": {33: ("half", 1)}}, "`half` is not a probability"),
        ({"256px": {33: (True, 1)}}, "`True` is not a probability"),
    ],
)
def test_a_wrong_config_is_refused_with_the_value(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        BucketTable(config, 16)


def test_the_digest_tells_configs_apart() -> None:
    def digest(config: dict[str, Any], step: int = 16) -> str:
        return BucketTable(config, step).digest()

    base = digest({"256px": {33: (1.0, 2), 17: (0.5, 4)}, "512px": {17: (1.0, 1)}})
    assert digest({"512px": {17: [1, 1]}, "256px": {17: [0.5, 4], 33: [1, 2]}}) == base
    others = [
        digest({"256px": {33: (1.0, 2), 17: (0.5, 4)}, "512px": {17: (1.0, 1)}}, step=32),
        digest({"256px": {33: (1.0, 2), 17: (0.5, 3)}, "512px": {17: (1.0, 1)}}),
        digest({"256px": {33: (1.0, 2), 17: (0.4, 4)}, "512px": {17: (1.0, 1)}}),
        digest({"256px": {33: (1.0, 2), 17: ((0.5, 0.0), 4)}, "512px": {17: (1.0, 1)}}),
        digest({"256px": {33: (1.0, 2), 17: (0.5, 4)}, "512px_max": {17: (1.0, 1)}}),
    ]
    assert len({base, *others}) == 6
