"""Signals to real trainings whose disk is slow: each save waits at a chosen step until the test lets it go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.process import Hold, start
from support.tiny import make_table, records, write_config

from osora_cli.checkpoint.leftovers import clean_leftovers
from osora_cli.checkpoint.verify import verify, verify_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    make_table(folder)
    return folder


class Training:
    """`osora train vae` without an end, as a process of its own."""

    def __init__(self, home: Path, folder: Path, *argv: str, phase: str, after: int = 0, nth: int = 1) -> None:
        self.run = folder / "run"
        self._hold = Hold(phase, folder / "reached", folder / "gate", nth=nth, after=after)
        config = write_config(folder, max_steps=100_000, tensorboard=False)
        line = ("train", "vae", config, "--exp-name", "run", "--outputs", folder, *argv)
        self.process, self.out, self.err = start(*line, cwd=home, kill=self._hold)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.exitcode is None, self.err.read_text()
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    def wait_for_updates(self, count: int) -> None:
        self.wait_for(lambda: self.updates() >= count)

    def updates(self) -> int:
        done = [record["step"] for record in records(self.run)] if (self.run / "metrics.jsonl").exists() else []
        return max(done, default=0)

    def wait_until_held(self) -> None:
        self.wait_for(self._hold.reached.exists)

    def let_go(self) -> None:
        self._hold.gate.touch()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def saved(self) -> list[int]:
        return sorted(int(p.name.rpartition("step")[2]) for p in self.run.glob("epoch*"))


def ended(process: BaseProcess, seconds: float = 120) -> int | None:
    process.join(seconds)
    return process.exitcode


# Where a save can be when it is left: in the background and in front of the training, and in the writer's own threads.
@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        ("--async-io", "pwrite"),
        pytest.param("--async-io", "fdatasync", marks=pytest.mark.sweep),
        pytest.param("--async-io", "fsync-folders", marks=pytest.mark.sweep),
        ("--no-async-io", "pwrite"),
        pytest.param("--no-async-io", "manifest", marks=pytest.mark.sweep),
    ],
)
def test_a_second_ctrl_c_ends_at_once(home: Path, tmp_path: Path, mode: str, phase: str) -> None:
    """The save never gets on: without the second Ctrl-C the process would not end."""
    training = Training(home, tmp_path, mode, phase=phase, after=1)
    training.wait_for_updates(1)
    training.send(signal.SIGUSR1)
    training.wait_for(lambda: (training.run / "latest").exists())
    (older,) = training.saved()
    training.wait_for_updates(older + 2)
    training.send(signal.SIGINT)
    training.wait_until_held()
    assert ended(training.process, 0.2) is None, "it waits for the save"
    training.send(signal.SIGINT)
    assert ended(training.process, 60) == 130, training.err.read_text()
    last = training.updates()
    said = training.err.read_text()
    lost = f"updates {older + 1} to {last} are lost"
    assert f"interrupted: second SIGINT: ended at once, without a save: {lost}\n" in said
    assert f"  fix: to go on from update {older}: `osora resume {training.run}`\n" in said
    assert "Traceback" not in said
    assert training.saved() == [older]
    whole = verify_run(training.run)
    assert whole.resume_from is not None
    assert verify(whole.resume_from).verdict == "ok"
    assert whole.resume_from.name == (training.run / "latest").read_text().strip()
    clean_leftovers(training.run)
    assert not list(training.run.glob(".staging-*"))


def test_a_second_ctrl_c_behind_the_commit_loses_nothing(home: Path, tmp_path: Path) -> None:
    training = Training(home, tmp_path, "--async-io", "--json", phase="latest")
    training.wait_for_updates(2)
    training.send(signal.SIGINT)
    training.wait_until_held()
    training.send(signal.SIGINT)
    assert ended(training.process, 60) == 130, training.err.read_text()
    (saved,) = training.saved()
    assert saved == training.updates()
    said = training.err.read_text()
    assert f"ended at once, update {saved} is saved, nothing is lost" in said
    assert f'"message": "second SIGINT: ended at once, update {saved} is saved' in training.out.read_text()
    whole = verify_run(training.run)
    assert whole.resume_from is not None
    assert verify(whole.resume_from).verdict == "ok"


def test_a_second_ctrl_c_in_a_run_without_a_checkpoint(home: Path, tmp_path: Path) -> None:
    training = Training(home, tmp_path, "--async-io", phase="write")
    training.wait_for_updates(2)
    training.send(signal.SIGINT)
    training.wait_until_held()
    training.send(signal.SIGINT)
    assert ended(training.process, 60) == 130, training.err.read_text()
    said = training.err.read_text()
    assert f"without a save: updates 1 to {training.updates()} are lost" in said
    assert "holds no checkpoint" in said
    assert "`--resume auto`" in said
    assert training.saved() == []


@pytest.mark.parametrize("phase", ["pwrite", pytest.param("commit-rename", marks=pytest.mark.sweep)])
def test_sigterm_while_a_save_is_written(home: Path, tmp_path: Path, phase: str) -> None:
    """SIGUSR1 saves and the training goes on. At a SIGTERM the save under way is finished, then the last update is
    saved as well, and both verify."""
    training = Training(home, tmp_path, "--async-io", phase=phase)
    training.wait_for_updates(1)
    training.send(signal.SIGUSR1)
    training.wait_until_held()
    during = training.updates()
    training.wait_for_updates(during + 2)
    assert training.saved() == [], "the training goes on while it is written"
    training.send(signal.SIGTERM)
    assert ended(training.process, 0.2) is None
    training.let_go()
    assert ended(training.process) == 143, training.err.read_text()
    first, last = training.saved()
    assert first < last == training.updates()
    assert (training.run / "latest").read_text().strip().endswith(f"global_step{last}")
    assert [verify(p).verdict for p in training.run.glob("epoch*")] == ["ok", "ok"]
    assert f"SIGTERM: stopped after update {last}, saved" in training.err.read_text()
    assert not list(training.run.glob(".staging-*"))
