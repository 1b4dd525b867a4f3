"""Which checkpoints stay, what is left of those that go, and who may clean up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.checkpoints import save
from support.opensora import write_async

from osora_cli.checkpoint import owner
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.checkpoint.leftovers import clean_leftovers, move_to_trash
from osora_cli.checkpoint.verify import verify, verify_run


def names(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir() if p.is_dir())


def steps(run: Path) -> list[int]:
    return [int(name.rpartition("step")[2]) for name in names(run) if name.startswith("epoch")]


def test_the_newest_stay(tmp_path: Path) -> None:
    events: list[SaveEvent] = []
    save(tmp_path, 1, 2, 3, 4, keep_n_latest=2, on_event=events.append)
    assert steps(tmp_path) == [3, 4]
    assert [e.path.name for e in events if e.kind == "removed"] == ["epoch0-global_step1", "epoch0-global_step2"]
    assert all(e.error is None for e in events)


@pytest.mark.parametrize(("keep", "left"), [(-1, [1, 2, 3]), (0, [3]), (1, [3]), (9, [1, 2, 3])])
def test_never_below_one(tmp_path: Path, keep: int, left: list[int]) -> None:
    save(tmp_path, 1, 2, 3, keep_n_latest=keep)
    assert steps(tmp_path) == left


def test_the_one_resumed_from_is_never_removed(tmp_path: Path) -> None:
    (first,) = save(tmp_path, 1)
    save(tmp_path, 2, 3, 4, keep_n_latest=1, protected=first)
    assert steps(tmp_path) == [1, 4]


def test_only_checkpoints_that_verify_are_counted_or_removed(tmp_path: Path) -> None:
    """Two good ones stay beside the damaged one: it is no substitute, and not thrown away unseen."""
    save(tmp_path, 1, 2, 3)
    (tmp_path / "epoch0-global_step3/model/model-00001.safetensors").write_bytes(b"")
    write_async(tmp_path / "epoch0-global_step0", 0)
    save(tmp_path, 4, keep_n_latest=2)
    assert steps(tmp_path) == [0, 2, 3, 4]


def test_pictures_stay_behind_alone(tmp_path: Path) -> None:
    (first,) = save(tmp_path, 1)
    (first / "eval/deep").mkdir(parents=True)
    (first / "eval/deep/a.png").write_bytes(b"x")
    save(tmp_path, 2, 3, keep_n_latest=1)
    assert steps(tmp_path) == [1, 3]
    assert [p.relative_to(first).as_posix() for p in first.rglob("*")] == ["eval", "eval/deep", "eval/deep/a.png"]
    assert verify(first).verdict == "pruned"
    report = verify_run(tmp_path)
    assert [row.verdict for row in report.rows] == ["pruned", "ok"]
    assert report.resume_from == tmp_path / "epoch0-global_step3"
    assert report.verdict == "ok"


def test_going_back_does_not_make_the_old_branch_the_newest(tmp_path: Path) -> None:
    """Saves 10 and 20, then a run taken back to 10 saves 15: that is the newest, and 20 the first to go."""
    save(tmp_path, 10, 20)
    save(tmp_path, 15)
    assert verify_run(tmp_path).resume_from == tmp_path / "epoch0-global_step15"
    save(tmp_path, 16, keep_n_latest=3)
    assert steps(tmp_path) == [15, 16, 20]


def test_a_checkpoint_that_cannot_be_removed_is_told_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(trash: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("osora_cli.checkpoint.retention.dispose", refuse)
    events: list[SaveEvent] = []
    save(tmp_path, 1, 2, keep_n_latest=1, on_event=events.append)
    assert [(e.kind, e.error) for e in events][-2:] == [("committed", None), ("removed", "Device or resource busy")]
    assert verify(tmp_path / "epoch0-global_step2").verdict == "ok"


class Sleeper:
    """Another process, whose folder this is."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def own(self, folder: Path, purpose: str = "save") -> None:
        folder.mkdir(exist_ok=True)
        owner.write_owner(folder, "save")
        data = json.loads((folder / ".owner.json").read_bytes())
        data |= {"pid": self.process.pid, "start": owner._start_time(self.process.pid), "purpose": purpose}
        (folder / ".owner.json").write_text(json.dumps(data))

    def kill(self, *, reap: bool = True) -> None:
        self.process.send_signal(signal.SIGKILL)
        if reap:
            self.process.wait()


@pytest.fixture
def sleeper():
    process = Sleeper()
    yield process
    process.kill()


def test_leftovers_of_a_live_owner_stay_and_of_a_dead_one_go(tmp_path: Path, sleeper: Sleeper) -> None:
    for name in (".staging-0-5-aaaaaaaa", ".trash-epoch0-global_step3-bbbbbbbb"):
        sleeper.own(tmp_path / name)
        (tmp_path / name / "part.safetensors").write_bytes(b"x")
    (tmp_path / "eval").mkdir()
    assert clean_leftovers(tmp_path) == []
    sleeper.kill()
    assert [p.name[:8] for p in clean_leftovers(tmp_path)] == [".staging", ".trash-e"]
    assert names(tmp_path) == ["eval"]


def test_a_zombie_is_dead(tmp_path: Path, sleeper: Sleeper) -> None:
    sleeper.own(tmp_path / ".staging-0-5-aaaaaaaa")
    sleeper.kill(reap=False)
    deadline = time.monotonic() + 5
    while owner._start_time(sleeper.process.pid) != "ended" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(clean_leftovers(tmp_path)) == 1


def test_a_later_process_with_the_same_number_is_not_the_owner(tmp_path: Path, sleeper: Sleeper) -> None:
    folder = tmp_path / ".staging-0-5-aaaaaaaa"
    sleeper.own(folder)
    data = json.loads((folder / ".owner.json").read_bytes())
    (folder / ".owner.json").write_text(json.dumps(data | {"start": "12"}))
    assert clean_leftovers(tmp_path) == [folder]


def test_another_hosts_folder_lives_while_its_heart_beats(tmp_path: Path) -> None:
    folder = tmp_path / ".staging-0-5-aaaaaaaa"
    folder.mkdir()
    (folder / ".owner.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": "1", "purpose": "save"}))
    assert clean_leftovers(tmp_path) == []
    old = time.time() - 601
    os.utime(folder / ".owner.json", (old, old))
    assert clean_leftovers(tmp_path) == [folder]


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"pid": "x"}'])
def test_without_a_readable_owner_age_decides(tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / ".staging-0-5-aaaaaaaa"
    folder.mkdir()
    if content is not None:
        (folder / ".owner.json").write_bytes(content)
    assert clean_leftovers(tmp_path) == []
    old = time.time() - 601
    for path in (*folder.iterdir(), folder):
        os.utime(path, (old, old))
    assert clean_leftovers(tmp_path) == [folder]


def test_pictures_in_the_trash_of_a_dead_process_come_back(tmp_path: Path, sleeper: Sleeper) -> None:
    (first,) = save(tmp_path, 1)
    (first / "eval").mkdir()
    (first / "eval/a.png").write_bytes(b"x")
    trash = move_to_trash(first, "retired")
    sleeper.own(trash, "retired")
    sleeper.kill()
    assert clean_leftovers(tmp_path) == [trash]
    assert verify(first).verdict == "pruned"
    assert (first / "eval/a.png").read_bytes() == b"x"


@pytest.mark.parametrize("successor", [False, True])
def test_a_replaced_checkpoint_comes_back_if_its_successor_never_came(
    tmp_path: Path, sleeper: Sleeper, successor: bool
) -> None:
    """What a death between two renames leaves, on a filesystem that cannot swap names."""
    (first,) = save(tmp_path, 1)
    trash = move_to_trash(first, "replaced")
    sleeper.own(trash, "replaced")
    if successor:
        save(tmp_path / "other", 1)
        shutil.move(tmp_path / "other/epoch0-global_step1", first)
    sleeper.kill()
    assert clean_leftovers(tmp_path) == [trash]
    assert verify(first).verdict == "ok"


def test_clean_up_beside_a_live_save(tmp_path: Path) -> None:
    """A second process that cleans in the middle of every step does not hurt the save."""
    save(tmp_path, 1, 2, 3, keep_n_latest=1, on_phase=lambda name: clean_leftovers(tmp_path) and None)
    assert steps(tmp_path) == [3]
    assert verify(tmp_path / "epoch0-global_step3").verdict == "ok"


def test_no_run_no_leftovers(tmp_path: Path) -> None:
    assert clean_leftovers(tmp_path / "none") == []
