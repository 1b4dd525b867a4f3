"""Files that hang or kill their reader, workers that are killed, interrupted runs: a row each, never a wait."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clips import make_clip, real_clip

from osora_cli.app.data.meta import make_meta
from osora_cli.data import meta_workers, prober
from osora_cli.data.prober import Facts, Prober
from osora_cli.errors import DataError, SetupError, UsageError


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "clips"
    folder.mkdir()
    for number in range(6):
        make_clip(folder / f"{number}.mp4", frames=4 + number)
    return folder


@pytest.fixture
def hanging(clips: Path) -> Iterator[str]:
    """A regular file that hangs whoever opens it, by a lease that is not given back until the test ends."""
    path = clips / "3.mp4"
    old = signal.signal(signal.SIGIO, signal.SIG_IGN)
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("this file system grants no leases, so no file can be made to hang")
        yield "clips/3.mp4"
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # forked workers have the descriptor, too
        os.close(descriptor)
        signal.signal(signal.SIGIO, old)


def rows(path: Path) -> list[str]:
    return [line.split(",")[0] for line in path.read_text().splitlines()[1:]]


def test_a_prober_outlives_its_children() -> None:
    clip = str(real_clip("carphone_pristine"))
    good = Facts(120, 144, 176, 29.97)
    with Prober(time_limit_s=1.0) as looker:
        assert looker.pid is None
        assert looker.probe(clip) == good
        first = looker.pid
        assert first is not None
        # Stopped, it hangs in earnest.
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        assert looker.probe(clip) == Facts(reason="took longer than 1 s")
        assert time.monotonic() - began < 20
        assert looker.probe(clip) == good
        second = looker.pid
        assert second not in (None, first)
        # Killed while it has a file.
        os.kill(second, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (second, signal.SIGKILL)).start()
        assert looker.probe(clip) == Facts(reason="the process that read it was ended by SIGKILL")
        assert looker.probe(clip) == good
        # Killed between two files: nobody is to blame.
        third = looker.pid
        assert third is not None
        os.kill(third, signal.SIGKILL)
        os.waitid(os.P_PID, third, os.WEXITED | os.WNOWAIT)
        assert looker.probe(clip) == good
        last = looker.pid
    assert looker.pid is None
    for pid in (first, second, third, last):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_reasons_reach_the_parent_and_children_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "_FILES_PER_CHILD", 2)
    with Prober() as looker:
        pids = []
        for _ in range(5):
            assert looker.probe(str(tmp_path / "gone.mp4")).reason == "no such file"
            pids.append(looker.pid)
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_a_child_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SetupError, match=r"could not be started: .* ended with code 1 \(.*No module named"):
        Prober().probe("x.mp4")


@pytest.mark.parametrize("deaths", [1, 99])
def test_a_child_that_is_killed_while_it_starts_is_started_again(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            if len(started) <= deaths:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(prober.subprocess, "Popen", Killed)
    monkeypatch.setattr(prober, "_START_PAUSE_S", 0.01)
    with Prober() as looker:
        if deaths == 1:
            assert looker.probe(str(real_clip("carphone_pristine"))).num_frames == 120
            assert len(started) == 2
        else:
            with pytest.raises(SetupError, match=r"could not be started: .* ended by SIGKILL"):
                looker.probe("x.mp4")
            assert len(started) == 3


def test_a_child_ends_with_its_parent() -> None:
    code = (
        "import os, signal; from osora_cli.data.prober import Prober; p = Prober(); p.probe('x.mp4');"
        "print(p.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    child = int(run.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_hangs_is_one_reported_row(workers: int, hanging: str, clips: Path) -> None:
    output = clips.parent / f"hang{workers}.csv"
    began = time.monotonic()
    result = make_meta(clips, output, num_workers=workers, time_limit_s=1.5)
    assert time.monotonic() - began < 40
    assert result.bad == [(hanging, "took longer than 1.5 s")]
    assert rows(output) == [f"clips/{number}.mp4" for number in (0, 1, 2, 4, 5)]


def test_a_pipe_does_not_even_hang(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    make_clip(tmp_path / "clips" / "a.mp4", frames=4)
    os.mkfifo(tmp_path / "clips" / "x.mp4")
    result = make_meta(tmp_path / "clips", tmp_path / "out.csv", time_limit_s=30)
    assert result.bad == [("clips/x.mp4", "not a regular file")]
    assert result.seconds < 15


def test_a_child_that_is_killed_is_one_reported_row(clips: Path, hanging: str) -> None:
    """The child is killed from outside while it holds a file, as by the system when memory runs out."""
    killed: list[int] = []

    def kill_whoever_hangs(done: int, _total: int) -> None:
        if done == 3 and not killed:  # the fourth file is the one that hangs
            killed.extend(_children_older_than(0, "probe_child"))
            threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in killed]).start()

    result = make_meta(clips, clips.parent / "killed.csv", time_limit_s=60, progress=kill_whoever_hangs)
    assert len(killed) == 1
    assert result.bad == [(hanging, "the process that read it was ended by SIGKILL")]
    assert result.rows == 5


def _children_older_than(seconds: float, mark: str) -> list[int]:
    """Children of this process whose command line holds `mark`."""
    found = []
    with open("/proc/uptime") as file:  # noqa: PTH123 - a kernel file
        now = float(file.read().split()[0])
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        age = now - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        if int(fields[1]) == os.getpid() and mark in command and age > seconds:
            found.append(int(entry.name))
    return found


def test_a_worker_that_is_killed_freezes_nothing(
    clips: Path, hanging: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandarallel waits for a killed worker for ever; its files are looked at by this process instead."""
    monkeypatch.setattr(meta_workers, "_LOST_AFTER_S", 0.5)
    killed: list[int] = []

    def kill_a_worker() -> None:
        deadline = time.monotonic() + 20
        while not killed and time.monotonic() < deadline:
            workers = [child for child in multiprocessing.active_children() if "PoolWorker" in child.name]
            if len(workers) == 2 and list((clips.parent / ".worker.csv.progress").glob("*.jsonl")):
                time.sleep(0.5)  # one of them is in the file that hangs by now, the other has done its share
                for worker in workers:
                    assert worker.pid is not None
                    killed.append(worker.pid)
                    os.kill(worker.pid, signal.SIGKILL)
            time.sleep(0.02)

    helper = threading.Thread(target=kill_a_worker)
    helper.start()
    result = make_meta(clips, clips.parent / "worker.csv", num_workers=2, time_limit_s=3)
    helper.join()
    assert len(killed) == 2
    assert result.bad == [(hanging, "took longer than 3 s")]
    assert rows(clips.parent / "worker.csv") == [f"clips/{number}.mp4" for number in (0, 1, 2, 4, 5)]
    assert "a worker process was killed" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_goes_on_where_it_was(workers: int, clips: Path, hanging: str) -> None:
    """Ctrl-C in a run of its own process: it ends at once and quietly, and the next one asks for what is left."""
    output = clips.parent / f"interrupted{workers}.csv"
    code = (
        "import sys; from pathlib import Path; from osora_cli.app.data.meta import make_meta\n"
        "try: make_meta(Path(sys.argv[1]), Path(sys.argv[2]), num_workers=int(sys.argv[3]))\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(clips), str(output), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    journal = output.with_name(f".{output.name}.progress")
    expected = 3 if workers == 0 else 4  # the rest of the worker's share waits behind the file that hangs
    deadline = time.monotonic() + 30
    while sum(file.read_bytes().count(b"\n") for file in journal.glob("*.jsonl")) < expected:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, out, err) == (130, b"", b"")
    assert not output.exists()
    seen: list[int] = []
    result = make_meta(
        clips, output, num_workers=workers, time_limit_s=1, progress=lambda done, total: seen.append(done)
    )
    assert seen[0] == expected
    assert result.rows == 5
    assert not journal.exists()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_process_and_no_lock(ended_by: signal.Signals, clips: Path, hanging: str) -> None:
    """pandarallel's processes are not told when the run is killed, and would hold its lock for ever."""
    output = clips.parent / f"killed{ended_by}.csv"
    code = (
        "import sys; from pathlib import Path; from osora_cli.app.data.meta import make_meta\n"
        "make_meta(Path(sys.argv[1]), Path(sys.argv[2]), num_workers=2)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(clips), str(output)], start_new_session=True)
    journal = output.with_name(f".{output.name}.progress")
    deadline = time.monotonic() + 30
    while not list(journal.glob("*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(ended_by)
    assert run.wait(20) == -ended_by
    with pytest.raises(DataError, match=r"took longer than 0\.5 s"):  # at once: the lock is not held
        make_meta(clips, output, time_limit_s=0.5, on_error="fail")
    while _alive_in_session(run.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive_in_session(session: int) -> list[int]:
    """Processes of a session that are not merely waiting to be collected."""
    alive = []
    for entry in Path("/proc").iterdir():
        try:
            # proc(5): behind the name in brackets come state, parent, group and session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[3]) == session and fields[0] != "Z":
            alive.append(int(entry.name))
    return alive


def test_two_runs_do_not_write_one_table_at_once(clips: Path, hanging: str) -> None:
    output = clips.parent / "twice.csv"
    other = threading.Thread(target=make_meta, args=(clips, output), kwargs={"time_limit_s": 3})
    other.start()
    try:
        while not output.with_name(".twice.csv.progress").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        with pytest.raises(UsageError, match="another `osora data meta` is writing"):
            make_meta(clips, output)
    finally:
        other.join()
    assert len(rows(output)) == 5


def test_a_file_that_changed_since_is_looked_at_again(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    make_clip(folder / "a.mp4", frames=4)
    journal = tmp_path / ".out.csv.progress"
    journal.mkdir()
    stat = (folder / "a.mp4").stat()
    line = '{"path": "%s", "stamp": [%d, %d], "facts": [99, 1, 1, 1.0, null]}\n'
    fresh = line % (folder / "a.mp4", stat.st_size, stat.st_mtime_ns)
    stale = line % (folder / "a.mp4", stat.st_size, stat.st_mtime_ns - 1)
    (journal / "1.jsonl").write_text(stale + '{"cut off')
    make_meta(folder, tmp_path / "out.csv")
    assert ",4,64,96," in (tmp_path / "out.csv").read_text()
    journal.mkdir()
    (journal / "1.jsonl").write_text(fresh)
    make_meta(folder, tmp_path / "out.csv")
    assert ",99,1,1," in (tmp_path / "out.csv").read_text(), "what is known is not asked again"
