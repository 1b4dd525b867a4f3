from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.report.base import RunStart
from osora_cli.report.tensorboard import TensorBoardScalars, cut_back


def write(run: Path, steps: range, start: int = 0, loss: float = 1.0) -> None:
    observer = TensorBoardScalars()
    observer.on_start(RunStart(run, start_update=start))
    for step in steps:
        observer.on_log({"step": step, "epoch": 0, "loss": loss * step, "samples": [1, 2], "lr": 1e-5, "text": "x"})
    observer.close()


def read(run: Path, tag: str = "loss") -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def raw_steps(run: Path) -> list[int]:
    """Steps of all summaries in the files, as a reader without any purging sees them."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        events = [Event.FromString(data) for data in RawEventFileLoader(str(path)).Load()]
        found += [e.step for e in events if e.HasField("summary")]
    return found


def test_scalars_and_only_scalars_are_written(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    assert read(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert sorted(accumulator.Tags()["scalars"]) == ["epoch", "loss", "lr"]


def test_values_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    observer = TensorBoardScalars()
    observer.on_start(RunStart(tmp_path))
    observer.on_log({"step": 1, "loss": 0.5})
    assert read(tmp_path) == [(1, 0.5)]
    observer.close()


def test_resume_leaves_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(4, 11), start=3, loss=2.0)
    write(tmp_path, range(9, 13), start=8, loss=3.0)
    expected = [(s, s * (1.0 if s <= 3 else 2.0 if s <= 8 else 3.0)) for s in range(1, 13)]
    assert read(tmp_path) == expected
    assert raw_steps(tmp_path) == list(range(1, 13))


def test_resume_further_back_than_an_earlier_resume(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(6, 11), start=5)
    write(tmp_path, range(3, 13), start=2, loss=4.0)
    assert raw_steps(tmp_path) == list(range(1, 13))
    assert read(tmp_path)[2:] == [(s, 4.0 * s) for s in range(3, 13)]


def test_a_running_tensorboard_drops_what_was_cut(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    write(tmp_path, range(4, 6), start=3, loss=2.0)
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 8), (5, 10)]


@pytest.mark.parametrize("cut", [1, 4, 20])
def test_a_record_that_a_kill_cut_goes(tmp_path: Path, cut: int) -> None:
    write(tmp_path, range(1, 5))
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    write(tmp_path, range(4, 6), start=3)
    assert raw_steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_damaged_record_ends_its_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    (path,) = (tmp_path / "tensorboard").iterdir()
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))
    cut_back(tmp_path, 10)
    assert raw_steps(tmp_path) == [1, 2, 3]


def test_nothing_to_cut_leaves_files_alone(tmp_path: Path) -> None:
    assert cut_back(tmp_path, 3) == 0
    write(tmp_path, range(1, 4))
    (path,) = (tmp_path / "tensorboard").iterdir()
    inode = path.stat().st_ino
    assert cut_back(tmp_path, 3) == 0
    assert path.stat().st_ino == inode
    assert cut_back(tmp_path, 1) == 2
    assert [p.name for p in (tmp_path / "tensorboard").iterdir()] == [path.name]


def test_saves_are_scalars_at_their_own_update(tmp_path: Path) -> None:
    observer = TensorBoardScalars()
    observer.on_start(RunStart(tmp_path))
    observer.on_log({"step": 7, "loss": 1.0})
    counters = Counters(epoch=0, step=10, global_step=10, batch_size=1, actual_update_step=5)
    observer.on_save(SaveEvent("submitted", Path("d"), counters))
    observer.on_save(SaveEvent("committed", Path("d"), counters, bytes=10, seconds=2.0, stall_seconds=0.25))
    observer.on_save(SaveEvent("removed", Path("e")))
    observer.close()
    assert read(tmp_path, "save/stall") == [(5, 0.25)]
    assert read(tmp_path, "save/bytes") == [(5, 10.0)]
    assert read(tmp_path, "save/gb_per_s") == [(5, pytest.approx(5e-9))]
