"""`osora data cache`: what is made, what is made again, and what training finds in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clips import make_clip
from support.tiny_cache import cache_config, make_table
from support.tiny_diffusion import CAUSAL

from osora_cli.app.cache.clips import ClipCache, cache_folder
from osora_cli.app.cache.feed import CachedFeed, open_cache
from osora_cli.app.cache.plan import Ranks, epochs_needed
from osora_cli.app.cache.run import make_cache
from osora_cli.app.data.input import make_sampler
from osora_cli.app.frozen_parts import build_frozen_parts
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.data.cache import ClipShape
from osora_cli.data.cached_batch import CachedBatch
from osora_cli.data.sampler import Position
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError
from osora_cli.model.latents import embed_texts, encode_latents

CPU = torch.device("cpu")
SHAPE = ClipShape(8, 32, 32)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_table(tmp_path_factory.mktemp("clips"))


def copy_of(table: Path, folder: Path) -> Path:
    for path in table.parent.iterdir():
        if path.is_file():
            shutil.copy2(path, folder / path.name)
    return folder / table.name


def feed_of(config: TrainDiffusionConfig) -> CachedFeed:
    rows = ClipTable.load(str(config.dataset.data_path))
    cache = open_cache(rows, config)
    assert cache is not None
    return CachedFeed(rows, make_sampler(rows, config), config, Position(0, 0), cache, pin_memory=False)


def cached(table: Path, **changes: Any) -> TrainDiffusionConfig:
    return cache_config(table, cached_video=True, cached_text=True, **changes)


def test_all_clips_and_captions_are_made_once(table: Path, tmp_path: Path) -> None:
    config = cache_config(table, cache_dir=str(tmp_path / "cache"))
    done: list[tuple[int, int | None]] = []
    first = make_cache(config, clips=lambda d, t=None: done.append((d, t)))
    assert (first.clips, first.clips_made, first.captions, first.captions_made) == (4, 4, 5, 5)
    assert done[-1] == (4, 4)
    assert first.bytes == 4 * 4 * 4 * 16 * 16 * 4 + 5 * (8 * 16 + 12) * 4
    again = make_cache(config)
    assert (again.clips_made, again.captions_made) == (0, 0)
    assert again.clips == 4


def test_cached_latents_are_what_the_autoencoder_makes(table: Path, tmp_path: Path) -> None:
    config = cached(table, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    parts = build_frozen_parts(config, CPU, torch.float32)
    plain = cache_config(table)
    from osora_cli.app.feed import TableFeed

    rows = ClipTable.load(table)
    pixels = TableFeed(rows, make_sampler(rows, plain), plain, Position(0, 0), pin_memory=False)
    feed = feed_of(config)
    assert feed.steps(0) == pixels.steps(0) == 2
    seen = 0
    for epoch in (0, 1):
        for got, read in zip(feed.batches(epoch, 0), pixels.batches(epoch, 0), strict=True):
            assert isinstance(got, CachedBatch)
            assert got.rows == read.rows
            assert got.texts == read.texts
            assert got.fps == read.fps
            assert got.positions == read.positions
            assert got.video.shape == read.video.shape
            assert parts.ae is not None
            assert got.latents is not None
            assert got.t5 is not None
            assert got.clip is not None
            fresh = encode_latents(parts.ae, read.video.float() / 127.5 - 1)
            torch.testing.assert_close(got.latents, fresh, rtol=0, atol=1e-6)
            embedded = embed_texts(parts, read.texts)
            assert torch.equal(got.t5, embedded.t5)
            assert torch.equal(got.clip, embedded.clip)
            seen += 1
    assert seen == 4
    pixels.close()
    feed.close()


def test_ranks_share_the_work_without_talking_to_each_other(table: Path, tmp_path: Path) -> None:
    config = cached(table, cache_dir=str(tmp_path / "cache"))
    second = make_cache(config, ranks=Ranks(1, 2, 0))
    assert (second.clips_made, second.captions_made) == (2, 2)
    with pytest.raises(DataError, match="lacks 2 clips"):
        feed_of(config)
    first = make_cache(config, ranks=Ranks(0, 2, 0))
    assert (first.clips_made, first.captions_made) == (2, 3)
    assert len(list(feed_of(config).batches(0, 0))) == 2


def test_a_cache_goes_on_where_it_was_left_and_makes_damaged_shards_again(table: Path, tmp_path: Path) -> None:
    config = cached(table, cache_dir=str(tmp_path / "cache"))
    make_cache(config, shard_bytes=1)
    shards = sorted((tmp_path / "cache" / "latents").glob("*.safetensors"))
    assert len(shards) == 4
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    again = make_cache(config)
    assert again.clips_made == 2
    assert list(again.damaged) == [f"latents/{shards[1].name}"]
    assert len(list(feed_of(config).batches(0, 0))) == 2


def test_a_cache_of_other_weights_is_told_apart(table: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    make_cache(cache_config(table, cache_dir=folder))
    # Another seed: an autoencoder without weights is another one then.
    other = cached(table, cache_dir=folder, seed=8)
    with pytest.raises(DataError, match="lacks 4 clips") as caught:
        feed_of(other)
    assert "made by other networks" in caught.value.message
    assert "clip0.mp4" in caught.value.message
    assert caught.value.hint is not None
    assert "osora data cache" in caught.value.hint
    make_cache(other)
    feed_of(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16"},
        {"bucket_config": {"32px_ar1:1": {6: [1.0, 2]}}},
        {"dataset": {"fps_max": 12}},
        {"cache_windows": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_latents_hang_on_is_in_their_keys(table: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = str(tmp_path / "cache")
    make_cache(cache_config(table, cache_dir=folder))
    if changes.get("dataset"):
        changes = {**changes, "bucket_config": {"32px_ar1:1": {4: [1.0, 2]}}}
    made = make_cache(cache_config(table, cache_dir=folder, **changes))
    assert made.clips_made == 4


def test_rows_may_move_and_tables_grow(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    folder = str(tmp_path / "cache")
    make_cache(cache_config(own, cache_dir=folder))
    head, *rows = own.read_text().splitlines()
    make_clip(tmp_path / "clip9.mp4", frames=8, first=2000)
    own.write_text("\n".join([head, rows[0].replace("clip0", "clip9"), *reversed(rows)]) + "\n")
    made = make_cache(cache_config(own, cache_dir=folder))
    assert (made.clips, made.clips_made) == (5, 1)


def test_a_clip_that_changed_is_made_again_and_named_until_then(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    config = cached(own, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    make_clip(own.parent / "clip2.mp4", frames=8, first=3000)
    with pytest.raises(DataError, match=r"lacks 1 clip: `clip2\.mp4`"):
        feed_of(config)
    assert make_cache(config).clips_made == 1
    feed_of(config)


def test_a_clip_that_is_only_touched_is_the_same(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    config = cached(own, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    (own.parent / "clip2.mp4").touch()
    feed_of(config)
    assert make_cache(config).clips_made == 0


def test_training_from_a_cache_needs_no_clips(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    config = cached(own, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    for clip in own.parent.glob("*.mp4"):
        clip.unlink()
    assert len(list(feed_of(config).batches(0, 0))) == 2


def test_an_unreadable_clip_is_replaced_by_one_of_its_bucket(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    (own.parent / "clip1.mp4").write_bytes(b"no clip")
    config = cached(own, cache_dir=str(tmp_path / "cache"), bucket_config={"32px_ar1:1": {8: [1.0, 1]}})
    made = make_cache(config)
    assert list(made.unreadable) == ["clip1.mp4"]
    assert made.clips_made == 3
    batches = list(feed_of(config).batches(0, 0))
    replaced = [batch for batch in batches if batch.replaced]
    assert len(batches) == 4
    assert len(replaced) == 1
    row, reason = replaced[0].replaced[0]
    assert row == 1
    assert "clip1.mp4" in reason
    assert replaced[0].rows[0] != 1


def test_too_many_unreadable_clips_end_it_and_what_is_made_stays(table: Path, tmp_path: Path) -> None:
    own = copy_of(table, tmp_path)
    (own.parent / "clip3.mp4").write_bytes(b"no clip")
    config = cache_config(own, cache_dir=str(tmp_path / "cache"), dataset={"max_bad_fraction": 0.0})
    with pytest.raises(DataError, match=r"clip3\.mp4"):
        make_cache(config)
    make_clip(own.parent / "clip3.mp4", frames=8, first=291)
    assert make_cache(config).clips_made == 1


def test_several_windows_of_a_clip_differ_and_alternate_over_epochs(tmp_path: Path) -> None:
    long = make_table(tmp_path, clips=2, frames=60)
    config = cached(long, cache_windows=2)
    assert make_cache(config).clips_made == 4
    assert cache_folder(config) == tmp_path / "clips.cache"
    feed = feed_of(config)
    first, second, third = (next(iter(feed.batches(epoch, 0))) for epoch in (0, 1, 2))
    latents = []
    for batch in (first, second, third):
        assert isinstance(batch, CachedBatch)
        assert batch.latents is not None
        latents.append(dict(zip(batch.rows, batch.latents, strict=True)))
    for row in (0, 1):
        assert not torch.equal(latents[0][row], latents[1][row])
        assert torch.equal(latents[0][row], latents[2][row])


def test_parts_that_conditions_show_are_cached_beside_the_whole(tmp_path: Path) -> None:
    clips = make_table(tmp_path, clips=2, frames=9)
    causal = {**CAUSAL, "bucket_config": {"32px_ar2:1": {9: [1.0, 2]}}}
    config = cached(clips, **causal)
    made = make_cache(config)
    assert made.clips_made == 2
    (batch,) = feed_of(config).batches(0, 0)
    assert isinstance(batch, CachedBatch)
    assert set(batch.parts) == {("head", 1), ("tail", 1)}
    assert batch.latents is not None
    assert batch.latents.shape == (2, 4, 3, 4, 4)
    assert all(part.shape == (2, 4, 1, 4, 4) for part in batch.parts.values())
    # A posterior's draw follows from the key alone: the same cache is made again bit for bit.
    other = cached(clips, **causal, cache_dir=str(tmp_path / "other"))
    make_cache(other)
    (again,) = feed_of(other).batches(0, 0)
    assert isinstance(again, CachedBatch)
    assert again.latents is not None
    assert torch.equal(batch.latents, again.latents)
    # Fewer kinds need fewer parts, which are there; further ones are made beside what is there.
    assert make_cache(cached(clips, **{**causal, "condition_config": {"t2v": 1}})).clips_made == 0


def test_text_alone_from_a_cache(table: Path, tmp_path: Path) -> None:
    config = cache_config(table, cached_text=True, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    feed = feed_of(config)
    (first, _) = feed.batches(0, 0)
    assert isinstance(first, CachedBatch)
    assert first.latents is None
    assert first.video.device == CPU
    assert first.t5 is not None
    null = ClipCache(ClipTable.load(table), config, video=False).null_text()
    assert null.t5.shape == (1, 8, 16)
    assert null.clip.shape == (1, 12)


def test_digests_are_found_without_building_when_the_weights_have_not_changed(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cached(table, cache_dir=str(tmp_path / "cache"))
    make_cache(config)
    import osora_cli.app.cache.models as cache_models

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("a network is built")

    monkeypatch.setattr(cache_models, "build_frozen_parts", fail)
    feed_of(config)


def test_buckets_left_to_chance_are_made_for_all_epochs_that_training_reaches(table: Path, tmp_path: Path) -> None:
    chance = {"bucket_config": {"32px_ar1:1": {8: [0.5, 1]}}, "cache_dir": str(tmp_path / "cache")}
    config = cached(table, **chance, epochs=12)
    rows = ClipTable.load(table)
    sampler = make_sampler(rows, config)
    # A clip is in its bucket every other epoch: the first epoch does not have all of them, twelve do.
    assert (sampler.bucket_ids(0) >= 0).sum() < 4
    assert make_cache(config).clips_made == 4
    feed = feed_of(config)
    assert sum(1 for epoch in range(12) for _ in feed.batches(epoch, 0)) == sum(feed.steps(e) for e in range(12)) > 12
    assert epochs_needed(config, make_sampler(rows, config)) == 12
    few = cached(table, **chance, epochs=12, max_steps=4)
    assert epochs_needed(few, make_sampler(rows, few)) < 12
    sure = cached(table, epochs=12)
    assert epochs_needed(sure, make_sampler(rows, sure)) == 1
