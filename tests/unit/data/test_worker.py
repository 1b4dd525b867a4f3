"""Signals, deaths and hangs of the loader's worker processes, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from support.clips import make_clip
from support.tables import clip_row, make_table

from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable
from osora_cli.errors import RunError


def _batches(count: int) -> list[Batch]:
    return [Batch((0,), 5, 64, 96, (i,), np.array([0])) for i in range(count)]


def _alive(pid: int) -> bool:
    """Not gone, and not only waiting for its parent to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, queue = set(), [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found.update(children)
        queue += children
    return found


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture
def table(tmp_path: Path) -> ClipTable:
    return make_table(tmp_path, [clip_row(make_clip(tmp_path / "clip.mp4", 20, (96, 64), 12))])


def _started(table: ClipTable, batches: list[Batch], **options: float) -> tuple[ClipLoader, Iterator[ClipBatch]]:
    """A loader with two workers that has given its first batch."""
    reader = ClipLoader(table, seed=0, fps_max=12, num_workers=2, **options)  # type: ignore[arg-type]
    pending = reader.read(batches, 0)
    next(pending)
    return reader, pending


def _pids(reader: ClipLoader) -> list[int]:
    return [worker.pid for worker in reader._workers if worker.pid is not None]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_workers_end_with_their_loader(table: ClipTable) -> None:
    reader, pending = _started(table, _batches(20))
    pids = _pids(reader)
    assert len(pids) == 2
    assert all(map(_alive, pids))
    reader.close()
    assert _wait(lambda: not any(map(_alive, pids)), 5)
    with pytest.raises(ValueError, match="closed"):
        next(pending)


def test_a_worker_that_is_killed_is_an_error_and_not_a_wait(table: ClipTable) -> None:
    reader, pending = _started(table, _batches(10_000))
    pids = _pids(reader)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(
        RunError, match=f"worker of the loader ended: process {pids[0]} was killed by SIGKILL"
    ) as caught:
        list(pending)
    assert caught.value.exit_code == 1
    assert "--num_workers" in (caught.value.hint or "")
    assert _wait(lambda: not any(map(_alive, pids)), 5)


def test_workers_that_give_nothing_are_given_up(table: ClipTable) -> None:
    """The second batch is 30,000 clips: many seconds of decoding."""
    long = Batch((0,) * 30_000, 1, 64, 96, tuple(range(30_000)), np.array([0]))
    reader, pending = _started(table, [*_batches(1), long], timeout_s=3.0)
    pids = _pids(reader)
    began = time.monotonic()
    with pytest.raises(RunError, match="no batch for 3 seconds"):
        next(pending)
    assert time.monotonic() - began < 20
    assert _wait(lambda: not any(map(_alive, pids)), 5)


def test_a_slow_batch_is_waited_for(table: ClipTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking after the workers every tenth of a second, while they stand still, loses no batch and no order."""
    monkeypatch.setattr("osora_cli.data.loader._POLL_S", 0.1)
    reader, pending = _started(table, _batches(40))
    pids = _pids(reader)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids]).start()
    began = time.monotonic()
    assert [batch.positions for batch in pending] == [(i,) for i in range(1, 40)]
    assert time.monotonic() - began > 1
    reader.close()


_UNCLOSED = """
import sys
import numpy as np
from osora_cli.data.loader import ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable

def main():
    global kept
    reader = ClipLoader(ClipTable.load(sys.argv[1]), seed=0, fps_max=12, num_workers=2)
    pending = reader.read([Batch((0,), 5, 64, 96, (i,), np.array([0])) for i in range(1000)], 0)
    kept = reader, pending, next(pending)
    print("failing", flush=True)
    raise KeyError("on the way")

if __name__ == "__main__":
    main()
"""


def test_a_program_that_fails_without_closing_its_loader_ends_at_once(table: ClipTable, tmp_path: Path) -> None:
    script = tmp_path / "unclosed.py"
    script.write_text(_UNCLOSED)
    command = [sys.executable, str(script), str(table.source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "failing\n"
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.rstrip().endswith("KeyError: 'on the way'")
    assert time.monotonic() - began < 25  # the grace of a worker is 30


# -- a trainer that is killed ------------------------------------------------------------------------------------------

_SCRIPT = """
import signal, sys
from pathlib import Path
import numpy as np
from osora_cli.data.loader import ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable

def main():
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: caught.append(signal.Signals(n).name))
    reader = ClipLoader(ClipTable.load(sys.argv[1]), seed=0, fps_max=12, num_workers=2)
    batches = [Batch((0,), 5, 64, 96, (i,), np.array([0])) for i in range(100_000)]
    read, after = 0, 0
    for batch in reader.read(batches, 0):
        read += 1
        if read == 4:
            print("reading", flush=True)
        after += len(caught) >= 2
        if after == 40:
            break
    reader.close()
    print(*caught, flush=True)

if __name__ == "__main__":
    main()
"""


def _trainer(table: ClipTable, tmp_path: Path) -> subprocess.Popen[str]:
    """A process of its own group that reads without end; returned once it reads."""
    script = tmp_path / "trainer.py"
    script.write_text(_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(table.source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n", process.communicate(timeout=60)
    return process


def test_a_trainer_that_is_killed_leaves_no_process(table: ClipTable, tmp_path: Path) -> None:
    process = _trainer(table, tmp_path)
    family = _descendants(process.pid)
    assert len(family) >= 3  # two workers and the server they come from
    process.kill()
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert _wait(lambda: not any(map(_alive, family)), 10), [pid for pid in family if _alive(pid)]


def test_signals_to_the_group_leave_the_workers_to_the_trainer(table: ClipTable, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal, or a batch system that ends a job: forty more batches come, and nothing is printed."""
    process = _trainer(table, tmp_path)
    family = _descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "SIGINT SIGTERM\n", "")
    assert _wait(lambda: not any(map(_alive, family)), 10)


def _train_for_ever(source: str, pids: str) -> None:
    reader, pending = _started(ClipTable.load(source), _batches(100_000))
    Path(pids).write_text(" ".join(map(str, _pids(reader))))
    for _ in pending:
        pass


def test_a_trainer_that_comes_from_a_fork_server_leaves_no_worker(table: ClipTable, tmp_path: Path) -> None:
    """Its workers come from the same server, which lives on."""
    note = tmp_path / "pids"
    context = multiprocessing.get_context("forkserver")
    process: BaseProcess = context.Process(target=_train_for_ever, args=(str(table.source), str(note)))
    process.start()
    assert _wait(lambda: note.exists() and len(note.read_text().split()) == 2, 60)
    pids = [int(pid) for pid in note.read_text().split()]
    assert all(map(_alive, pids))
    process.kill()
    process.join()
    assert _wait(lambda: not any(map(_alive, pids)), 10)
