from __future__ import annotations

import hashlib
import math
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.clips import cut_bytes, frame_number, make_clip, picture, real_clips
from support.tables import clip_row, make_table

from osora_cli.data import clip_reader, loader
from osora_cli.data.clip_reader import BatchResult, BatchTask, ClipSource, ReadOptions, read_batch
from osora_cli.data.crop import draw_frame_indices
from osora_cli.data.draws import draw_rng
from osora_cli.data.fps import map_target_fps
from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.media import is_still, read_frames
from osora_cli.data.plan import Batch
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import normalize, resize_crop_image, resize_crop_video
from osora_cli.errors import DataError, RunError

FPS_MAX = 12
MIXED = {"96px": {1: (1.0, 2), 5: (1.0, 2), 9: (0.6, 2)}}


def sampler_of(table: ClipTable, config: dict[str, Any], **options: Any) -> BucketSampler:
    columns = (table.num_frames, table.height, table.width, table.fps)
    options = {"spatial_compression": 16, "fps_max": FPS_MAX, "seed": 5, "drop_last": False, **options}
    return BucketSampler(*columns, bucket_config=config, **options)


def digest(batch: ClipBatch) -> tuple[Any, ...]:
    """All that a batch holds but the time that was waited for it."""
    pixels = hashlib.sha1(batch.video.numpy().tobytes()).hexdigest()
    rest = (batch.rows, batch.positions, batch.texts, batch.fps, batch.replaced, batch.shortened)
    return tuple(batch.video.shape), pixels, *rest


def read_pass(table: ClipTable, batches: Sequence[Batch], *, epoch: int, **options: Any) -> Iterator[ClipBatch]:
    """One pass by a loader of its own."""
    with closing(ClipLoader(table, **options)) as reader:
        yield from reader.read(batches, epoch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def table(folder: Path) -> ClipTable:
    """Real clips, made ones of several shapes and rates, and stills."""
    rows = [clip_row(path) for path in real_clips()]
    for i, (size, fps, frames) in enumerate([((192, 64), 24, 30), ((64, 192), 12, 25), ((128, 96), 30, 40)]):
        rows.append(clip_row(make_clip(folder / f"made {i}.mp4", frames, size, fps)))
    for i, size in enumerate([(192, 64), (64, 192), (160, 120)]):
        Image.fromarray(picture(i, size)).save(folder / f"still{i}.png")
        rows.append(clip_row(folder / f"still{i}.png"))
    return make_table(folder, rows)


def _read(table: ClipTable, workers: int, epochs: int = 2) -> list[tuple[Any, ...]]:
    sampler, seen = sampler_of(table, MIXED), []
    reader = ClipLoader(table, seed=5, fps_max=FPS_MAX, num_workers=workers)
    for epoch in range(epochs):
        seen += [digest(batch) for batch in reader.read(sampler.epoch_batches(epoch), epoch)]
    reader.close()
    return seen


@pytest.fixture(scope="module")
def in_process(table: ClipTable) -> list[tuple[Any, ...]]:
    return _read(table, workers=0)


# -- what is delivered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_nothing(table: ClipTable, in_process: list[tuple[Any, ...]], workers: int) -> None:
    assert len(in_process) >= 8
    moving = [pixels for shape, pixels, *_ in in_process if shape[2] > 1]
    assert len(set(moving)) == len(moving) >= 6
    assert _read(table, workers) == in_process


def test_a_batch_is_what_the_rules_say(table: ClipTable) -> None:
    """Decoding, drawing, resizing done here by hand on the float path, clip by clip."""
    sampler = sampler_of(table, MIXED)
    seen_stills = 0
    for batch, plan in zip(
        read_pass(table, list(sampler.epoch_batches(1)), seed=5, epoch=1, fps_max=FPS_MAX),
        sampler.epoch_batches(1),
        strict=True,
    ):
        shape = (len(plan.rows), 3, plan.frames, plan.height, plan.width)
        assert tuple(batch.video.shape) == shape
        assert batch.video.dtype == torch.uint8
        assert batch.video.is_contiguous()
        assert (batch.rows, batch.positions) == (plan.rows, plan.positions)
        assert batch.replaced == batch.shortened == ()
        for i, row in enumerate(batch.rows):
            path, size = table.resolve(row), (plan.height, plan.width)
            new_fps, interval = map_target_fps(float(table.fps[row]), FPS_MAX)
            if is_still(path):
                seen_stills += 1
                assert torch.equal(batch.video[i, :, 0], resize_crop_image(read_frames(path, [0])[0], size))
                assert (batch.texts[i], batch.fps[i]) == (table.text_of(row), 0)
                continue
            rng = draw_rng(5, 1, plan.positions[i], "clip")
            indices = draw_frame_indices(int(table.num_frames[row]), plan.frames, interval, rng)
            frames = torch.from_numpy(read_frames(path, indices.tolist())).permute(0, 3, 1, 2)
            want = resize_crop_video(frames, size).transpose(0, 1)
            assert (normalize(batch.video[i]) - want).abs().max() <= 1 / 255 + 1e-6
            assert batch.texts[i] == f"{table.text_of(row)} {new_fps} FPS."
            assert batch.fps[i] == new_fps
    assert seen_stills >= 3


@pytest.mark.parametrize(("size", "ratio"), [((192, 64), "2.39:1"), ((64, 192), "1:2.39")])
def test_lying_and_standing_clips_are_not_turned(tmp_path: Path, size: tuple[int, int], ratio: str) -> None:
    """Red rises to the right and green downwards, as in the source, and the long side stays the long one."""
    table = make_table(tmp_path, [clip_row(make_clip(tmp_path / "clip.mp4", 12, size, 12))])
    plan = sampler_of(table, {f"112px_ar{ratio}": {5: (1.0, 1)}}).epoch_batches(0)
    (batch,) = read_pass(table, plan, seed=5, epoch=0, fps_max=FPS_MAX)
    height, width = batch.video.shape[-2:]
    assert (width > height) == (size[0] > size[1])
    red, green = batch.video[0, 0].float(), batch.video[0, 1].float()
    assert red[:, :, -8:].mean() > red[:, :, :8].mean() + 25
    assert green[:, -8:].mean() > green[:, :8].mean() + 25


def test_frames_come_in_their_order_from_one_window(tmp_path: Path) -> None:
    """At the source's own size the numbers written into the frames can be read back."""
    table = make_table(tmp_path, [clip_row(make_clip(tmp_path / "clip.mp4", 80, (96, 64), 24))])
    batch = Batch((0,), 9, 64, 96, (17,), np.array([0]))
    (got,) = read_pass(table, [batch], seed=3, epoch=2, fps_max=12)
    numbers = [frame_number(image) for image in got.video[0].permute(1, 2, 3, 0).numpy()]
    rng = draw_rng(3, 2, 17, "clip")
    assert numbers == draw_frame_indices(80, 9, 2, rng).tolist()


def test_another_seed_epoch_or_position_is_another_window(tmp_path: Path) -> None:
    table = make_table(tmp_path, [clip_row(make_clip(tmp_path / "clip.mp4", 120, (96, 64), 24))])

    def first(seed: int, epoch: int, position: int) -> int:
        batch = Batch((0,), 5, 64, 96, (position,), np.array([0]))
        (got,) = read_pass(table, [batch], seed=seed, epoch=epoch, fps_max=24)
        return frame_number(got.video[0, :, 0].permute(1, 2, 0).numpy())

    assert len({first(0, 0, position) for position in range(8)}) > 4
    assert len({first(0, epoch, 0) for epoch in range(8)}) > 4
    assert len({first(seed, 0, 0) for seed in range(8)}) > 4


def test_a_drawn_interval_spreads_the_frames(tmp_path: Path) -> None:
    table = make_table(tmp_path, [clip_row(make_clip(tmp_path / "clip.mp4", 60, (96, 64), 24))])
    spans = set()
    for position in range(12):
        batch = Batch((0,), 10, 64, 96, (position,), np.array([0]))
        (got,) = read_pass(table, [batch], seed=0, epoch=0, fps_max=24, rand_sample_interval=3)
        numbers = [frame_number(image) for image in got.video[0].permute(1, 2, 3, 0).numpy()]
        spans.add(numbers[-1] - numbers[0] + 1)
    assert spans == {10, 20, 30}


def test_motion_scores_stand_in_captions_when_asked_for(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 20, (96, 64), 12)
    rows = [{**clip_row(path, "None"), "score_vmafmotion": score} for score in (3.6, "")]
    table = make_table(tmp_path, rows)
    batch = Batch((0, 1), 5, 64, 96, (0, 1), np.array([0, 1]))
    for motion, text in ((False, "None 12 FPS."), (True, "None 12 FPS, 4 motion score.")):
        (got,) = read_pass(table, [batch], seed=0, epoch=0, fps_max=12, motion_score=motion)
        assert got.texts == (text, "None 12 FPS.")
        # The score itself is there either way, for who writes captions in another manner.
        assert got.motion_scores[0] == 3.6
        assert math.isnan(got.motion_scores[1])
    unscored = make_table(tmp_path, [clip_row(path)])
    (got,) = read_pass(unscored, [Batch((0,), 5, 64, 96, (0,))], seed=0, epoch=0, fps_max=12)
    assert math.isnan(got.motion_scores[0])


# -- passes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_pass_from_its_middle_is_the_rest_of_the_pass(
    table: ClipTable, in_process: list[tuple[Any, ...]], workers: int
) -> None:
    sampler = sampler_of(table, MIXED)
    first = len(sampler.epoch_batches(0))
    epoch, start = sampler.resume(sampler.state(1, 2))
    plan = sampler.epoch_batches(epoch, start)
    got = read_pass(table, plan, seed=5, epoch=epoch, fps_max=FPS_MAX, num_workers=workers)
    assert [digest(batch) for batch in got] == in_process[first + 2 :]
    if workers:
        return
    sliced = read_pass(table, sampler.epoch_batches(1)[2:], seed=5, epoch=1, fps_max=FPS_MAX)
    assert [digest(batch) for batch in sliced] == in_process[first + 2 :]


def test_what_is_skipped_is_not_decoded(tmp_path: Path) -> None:
    rows = [clip_row(make_clip(tmp_path / f"{i}.mp4", 20, (96, 64), 12)) for i in range(4)]
    table = make_table(tmp_path, rows)
    plan = sampler_of(table, {"64px_ar3:2": {5: (1.0, 1)}}, shuffle=False).epoch_batches(0)
    for i in range(2):
        (tmp_path / f"{i}.mp4").unlink()
    got = list(read_pass(table, plan[2:], seed=5, epoch=0, fps_max=FPS_MAX, max_bad_fraction=0))
    assert [batch.rows for batch in got] == [(2,), (3,)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_broken_off_does_not_show_in_the_next(
    table: ClipTable, in_process: list[tuple[Any, ...]], workers: int
) -> None:
    sampler = sampler_of(table, MIXED)
    reader = ClipLoader(table, seed=5, fps_max=FPS_MAX, num_workers=workers, prefetch_factor=3)
    old = reader.read(sampler.epoch_batches(0), 0)
    assert digest(next(old)) == in_process[0]
    got = [digest(batch) for batch in reader.read(sampler.epoch_batches(1), 1)]
    assert got == in_process[len(sampler.epoch_batches(0)) :]
    with pytest.raises(ValueError, match="another pass"):
        next(old)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(sampler.epoch_batches(0), 0)


def test_an_empty_pass_yields_nothing(table: ClipTable) -> None:
    plan = sampler_of(table, {"96px": {999: (1.0, 1)}}).epoch_batches(0)
    assert list(read_pass(table, plan, seed=0, epoch=0, fps_max=12, num_workers=2)) == []


def test_global_generators_are_left_alone(table: ClipTable) -> None:
    def states() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), *rest

    before = states()
    plan = sampler_of(table, MIXED).epoch_batches(0)[:2]
    for workers in (0, 1):
        assert len(list(read_pass(table, plan, seed=5, epoch=0, fps_max=FPS_MAX, num_workers=workers))) == 2
    assert states() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_for_a_gpu_are_page_locked(
    table: ClipTable, in_process: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sampler_of(table, MIXED).epoch_batches(0)[:3]
    for shared_memory in ("/dev/shm", "/nowhere"):
        monkeypatch.setattr(loader, "_SHARED_MEMORY", shared_memory)
        for workers in (0, 2):
            options = {"seed": 5, "epoch": 0, "fps_max": FPS_MAX, "num_workers": workers, "pin_memory": True}
            got = list(read_pass(table, plan, **options))
            assert all(batch.video.is_pinned() for batch in got)
            assert [digest(batch) for batch in got] == in_process[:3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_page_locking_is_left_out_without_a_gpu(table: ClipTable, in_process: list[tuple[Any, ...]]) -> None:
    plan = sampler_of(table, MIXED).epoch_batches(0)[:1]
    got = list(read_pass(table, plan, seed=5, epoch=0, fps_max=FPS_MAX, num_workers=1, pin_memory=True))
    assert [digest(batch) for batch in got] == in_process[:1]
    assert not got[0].video.is_pinned()


def test_without_room_in_shared_memory_pixels_take_the_pipe(
    table: ClipTable, in_process: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sampler_of(table, MIXED).epoch_batches(0)
    assert loader._fits_shared_memory(plan, 4) == loader._fits_shared_memory(list(plan), 4)
    monkeypatch.setattr(loader, "_SHARED_MEMORY", "/nowhere")
    assert not loader._fits_shared_memory(plan, 4)
    got = list(read_pass(table, plan[:3], seed=5, epoch=0, fps_max=FPS_MAX, num_workers=2))
    assert [digest(batch) for batch in got] == in_process[:3]
    for batch in got:
        batch.video.zero_()  # it can be written to


def test_workers_get_no_table(table: ClipTable) -> None:
    """A task is a few rows, whatever the table's size, and the dataset holds none."""
    reader = ClipLoader(table, seed=5, fps_max=FPS_MAX)
    batch = sampler_of(table, MIXED).epoch_batches(0)[0]
    task = reader._task(batch, 0, 1, True)
    assert len(task.clips) == len(batch.rows)
    assert len(task.spares) <= len(batch.rows) + loader._SPARES
    big = Batch(batch.rows, 5, 64, 64, batch.positions, np.arange(len(table)).repeat(100_000))
    assert len(pickle.dumps(reader._task(big, 0, 1, True))) < 10_000
    assert reader._loader is not None
    assert len(pickle.dumps(reader._loader.dataset)) < 1_000


def test_paths_hold_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clip(tmp_path / "a clip, 100%#.mp4", 20, (96, 64), 12)
    monkeypatch.chdir(tmp_path)
    table = make_table(Path(), [clip_row(Path("a clip, 100%#.mp4"))])
    batch = Batch((0,), 5, 64, 96, (0,), np.array([0]))
    for workers in (0, 1):
        got = list(read_pass(table, [batch] * 2, seed=0, epoch=0, fps_max=12, num_workers=workers))
        assert [each.replaced for each in got] == [(), ()]


# -- clips that fail ---------------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> ClipTable:
    """Twelve good clips of one bucket and one of each kind of fault; rows 0 to 3 are the faults."""
    good = [clip_row(make_clip(tmp_path / f"good{i}.mp4", 20, (96, 64), 12, first=40 * i)) for i in range(12)]
    (tmp_path / "stub.mp4").write_bytes(b"not a film")
    cut_bytes(tmp_path / "good0.mp4", tmp_path / "cut.mp4", 0.5)
    Image.fromarray(picture(0)).save(tmp_path / "still.png")
    bad = []
    for name in ("stub.mp4", "missing.mp4", "cut.mp4", "still.png"):
        bad.append({**good[0], "path": str(tmp_path / name), "text": f"bad {name}"})
    return make_table(tmp_path, bad + good)


# 96x64, the clips' own size: what is written into frames can be read back.
BUCKET = {"78px_ar2:1": {9: (1.0, 2)}}


def test_a_clip_that_fails_is_replaced_from_its_bucket_with_its_own_caption(faulty: ClipTable) -> None:
    plan = sampler_of(faulty, BUCKET).epoch_batches(0)
    assert len(plan) == 8
    runs = []
    for workers in (0, 2):
        options = {"seed": 5, "epoch": 0, "fps_max": FPS_MAX, "max_bad_fraction": 0.9, "num_workers": workers}
        runs.append(list(read_pass(faulty, plan, **options)))
    assert list(map(digest, runs[0])) == list(map(digest, runs[1]))
    replaced = dict(pair for batch in runs[0] for pair in batch.replaced)
    assert set(replaced) == {0, 1, 2, 3}
    for row, words in enumerate(("stub.mp4", "does not exist", "cut.mp4", "a still cannot give 9 frames")):
        assert words in replaced[row]
    for batch, planned in zip(runs[0], plan, strict=True):
        assert batch.positions == planned.positions
        assert len(set(batch.rows)) == len(batch.rows)
        for i, row in enumerate(batch.rows):
            assert row >= 4
            # Pixels and caption are of the same clip: its frames are numbered from 40 times its own number.
            assert batch.texts[i].startswith(f"good{row - 4} ")
            number = frame_number(batch.video[i, :, 0].permute(1, 2, 0).numpy())
            assert 0 <= number - (row - 4) * 40 < 20
            if planned.rows[i] >= 4:
                assert row == planned.rows[i]


def test_no_failure_may_be_allowed(faulty: ClipTable) -> None:
    plan = sampler_of(faulty, BUCKET).epoch_batches(0)
    with pytest.raises(DataError, match="1 of ") as caught:
        list(read_pass(faulty, plan, seed=5, epoch=0, fps_max=FPS_MAX, max_bad_fraction=0))
    assert caught.value.exit_code == 3
    assert "max_bad_fraction" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_failures_stop_the_pass_and_are_listed(faulty: ClipTable, workers: int) -> None:
    plan = sampler_of(faulty, BUCKET).epoch_batches(0)
    options = {"seed": 5, "epoch": 0, "fps_max": FPS_MAX, "num_workers": workers}
    with pytest.raises(DataError) as caught:
        list(read_pass(faulty, plan, max_bad_fraction=0.1, **options))
    assert "4 of " in caught.value.message
    for name in ("stub.mp4", "missing.mp4", "cut.mp4", "still.png"):
        assert name in caught.value.message


def test_a_bucket_in_which_nothing_can_be_read_stops_with_its_files(tmp_path: Path) -> None:
    good = clip_row(make_clip(tmp_path / "good.mp4", 20, (96, 64), 12))
    table = make_table(tmp_path, [{**good, "path": str(tmp_path / f"gone{i}.mp4")} for i in range(3)])
    plan = sampler_of(table, {"78px_ar2:1": {9: (1.0, 1)}}).epoch_batches(0)
    for workers in (0, 1):
        with pytest.raises(DataError) as caught:
            list(read_pass(table, plan, seed=0, epoch=0, fps_max=12, max_bad_fraction=1, num_workers=workers))
        assert all(f"gone{i}.mp4" in caught.value.message for i in range(3))
        assert "9 frames of 96x64" in caught.value.message


def test_retries_are_bounded(tmp_path: Path) -> None:
    good = clip_row(make_clip(tmp_path / "good.mp4", 20, (96, 64), 12))
    table = make_table(tmp_path, [{**good, "path": str(tmp_path / f"gone{i}.mp4")} for i in range(60)] + [good])
    batch = Batch((0,), 9, 64, 96, (0,), np.arange(60))
    with pytest.raises(DataError, match="and 5 more"):
        list(read_pass(table, [batch], seed=0, epoch=0, fps_max=12, max_bad_fraction=1))


def test_a_file_with_fewer_frames_than_the_table_says_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 20, (96, 64), 12)
    other = make_clip(tmp_path / "other.mp4", 60, (96, 64), 12, first=100)
    table = make_table(tmp_path, [clip_row(path, num_frames=400), clip_row(other)])
    members = np.array([0, 1])
    (got,) = read_pass(table, [Batch((0,), 9, 64, 96, (0,), members)], seed=0, epoch=0, fps_max=12)
    assert got.rows == (0,)
    assert got.replaced == ()
    ((row, reason),) = got.shortened
    assert row == 0
    assert "400 frames, the file holds 20" in reason
    numbers = [frame_number(image) for image in got.video[0].permute(1, 2, 3, 0).numpy()]
    assert numbers == list(range(numbers[0], numbers[0] + 9))
    assert numbers[-1] < 20
    # Too short for the bucket: another clip takes its place.
    (got,) = read_pass(table, [Batch((0,), 33, 64, 96, (0,), members)], seed=0, epoch=0, fps_max=12)
    assert got.rows == (1,)
    assert [row for row, _ in got.replaced] == [0]


def _task(path: Path) -> BatchTask:
    source = ClipSource(0, (str(path),), "text", 20, 12.0, math.nan)
    return BatchTask(1, 0, 5, 64, 96, (0,), (source,), (), True)


def test_an_unforeseen_error_comes_as_one_that_names_the_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise ZeroDivisionError("by zero")

    path = make_clip(tmp_path / "clip.mp4", 20, (96, 64), 12)
    monkeypatch.setattr(clip_reader, "read_frames", broken)
    table = make_table(tmp_path, [clip_row(path)])
    with pytest.raises(RunError, match=r"clip\.mp4` ended in ZeroDivisionError: by zero") as caught:
        list(read_pass(table, [Batch((0,), 5, 64, 96, (0,), np.array([0]))], seed=0, epoch=0, fps_max=12))
    assert "in broken" in str(caught.value.__cause__)


def test_results_cross_processes_with_their_error(tmp_path: Path) -> None:
    options = ReadOptions(0, 12, None)
    result = read_batch(_task(tmp_path / "gone.mp4"), options)
    copy: BatchResult = pickle.loads(pickle.dumps(result))  # noqa: S301
    assert copy.number == 1
    assert isinstance(copy.error, DataError)
    assert str(copy.error) == str(result.error)
    assert copy.error.hint
    assert copy.video is None


def test_stills_have_no_rate(table: ClipTable) -> None:
    stills = [row for row in range(len(table)) if math.isnan(table.fps[row])]
    assert len(stills) == 3
    batch = Batch(tuple(stills), 1, 64, 64, (0, 1, 2), np.array(stills))
    (got,) = read_pass(table, [batch], seed=0, epoch=0, fps_max=12)
    assert got.fps == (0, 0, 0)
    assert tuple(got.video.shape) == (3, 3, 1, 64, 64)
