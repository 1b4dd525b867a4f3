"""Errors of the system's calls, by a preloaded shim: told with the file's name, and never a checkpoint that lies."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import save
from support.io_shim import build_shim, read_trace
from support.kill_server import KillServer

from osora_cli.checkpoint.resolve import newest_verified
from osora_cli.checkpoint.verify import verify

OLD, NEW = 4, 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillServer]:
    server = KillServer(build_shim(tmp_path_factory.mktemp("shim")))
    yield server
    server.close()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("before")
    save(run, OLD)
    return run


@pytest.fixture
def run(before: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(before, tmp_path / "run"))


@dataclass(frozen=True)
class Fault:
    """A call that fails, on files whose path holds `part`; `says`: what the error names."""

    call: str
    code: int
    part: str
    says: str
    nth: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.call} {errno.errorcode[self.code]} {self.part or 'any'} {self.nth}"

    def order(self) -> dict[str, Any]:
        return {"call": self.call, "errno": self.code, "nth": self.nth, "count": self.count, "part": self.part}


FAULTS = [
    Fault("pwrite", errno.EIO, "model-00001", "Input/output error (`model-00001.safetensors`)"),
    Fault("pwrite", errno.EIO, "master", "Input/output error (`master.safetensors`)", nth=2),
    Fault("pwrite", errno.EIO, "optimizer-00001", "(`optimizer-00001.safetensors`)", nth=3),
    Fault("pwrite", errno.EDQUOT, "optimizer-00001", "Disk quota exceeded"),
    Fault("pwrite", errno.ENOSPC, "lr_scheduler", "No space left on device (`lr_scheduler`)"),
    Fault("pwrite", errno.EIO, "running_states", "Input/output error (`running_states.json`)"),
    Fault("pwrite", errno.EIO, "manifest", "Input/output error"),
    Fault("fdatasync", errno.EIO, "master", "Input/output error (`master.safetensors`)"),
    Fault("fdatasync", errno.EIO, "model-00001", "Input/output error (`model-00001.safetensors`)"),
    Fault("fsync", errno.EIO, "running_states", "Input/output error (`running_states.json`)"),
    Fault("fsync", errno.EIO, "manifest", "Input/output error"),
    Fault("fsync", errno.EIO, "/optimizer", "Input/output error (`optimizer.safetensors.index.json`)"),
    Fault("close", errno.EIO, "master", "Input/output error (`master.safetensors`)"),
    Fault("close", errno.ENOSPC, "optimizer-00001", "No space left on device (`optimizer-00001.safetensors`)"),
    Fault("posix_fallocate", errno.ENOSPC, "", "No space left on device", nth=3),
    Fault("posix_fallocate", errno.EIO, "", "Input/output error"),
    Fault("rename", errno.EIO, "manifest", "Input/output error"),
    Fault("rename", errno.EIO, "epoch0-global_step5", "Input/output error"),
]


def check_untouched(run: Path) -> None:
    """The checkpoint before is the one and only, and nothing else is left."""
    assert sorted(p.name for p in run.iterdir()) == [f"epoch0-global_step{OLD}", "latest"]
    resolved = newest_verified(run)
    assert resolved is not None
    assert resolved.path.name == f"epoch0-global_step{OLD}"
    assert verify(resolved.path).verdict == "ok"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_an_error_costs_the_save_and_nothing_else(server: KillServer, run: Path, fault: Fault) -> None:
    answer = server.order(run, NEW, keep=1, fault=fault.order())
    assert answer["error"] is not None, "the shim was not asked"
    assert f"`epoch0-global_step{NEW}` was not saved: " in answer["error"]
    assert fault.says in answer["error"]
    check_untouched(run)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_the_ema_of_a_synchronous_save(server: KillServer, run: Path, call: str) -> None:
    fault = Fault(call, errno.EIO, "ema.pt", "Input/output error")
    answer = server.order(run, NEW, keep=1, async_io=False, fault=fault.order())
    assert answer["error"] is not None
    assert fault.says in answer["error"]
    check_untouched(run)


@pytest.mark.parametrize("async_io", [True, False])
def test_short_writes_are_resumed(server: KillServer, run: Path, async_io: bool) -> None:
    """Every write stops half-way; the files are whole all the same."""
    answer = server.order(run, NEW, async_io=async_io, fault={"call": "pwrite", "errno": 0, "count": 400})
    assert answer["error"] is None
    assert verify(run / f"epoch0-global_step{NEW}").verdict == "ok"


def test_writes_that_get_nowhere_end(server: KillServer, run: Path) -> None:
    answer = server.order(run, NEW, fault={"call": "pwrite", "errno": -1, "part": "master"})
    assert "the write made no progress" in answer["error"]
    check_untouched(run)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_filesystem_that_cannot_reserve(server: KillServer, run: Path, code: int) -> None:
    answer = server.order(run, NEW, fault={"call": "posix_fallocate", "errno": code})
    assert answer["error"] is None
    assert verify(run / f"epoch0-global_step{NEW}").verdict == "ok"


def test_a_limit_on_the_size_of_files(server: KillServer, run: Path) -> None:
    """`ulimit -f`: EFBIG."""
    answer = server.order(run, NEW, fsize=20_000)
    assert "File too large" in answer["error"]
    check_untouched(run)


def check_failed_sync(server: KillServer, run: Path, number: int) -> None:
    """The name may be there and not be on the disk: no success is told, and what a resume finds is whole."""
    fault = Fault("fsync", errno.EIO, "", "", nth=number)
    answer = server.order(run, NEW, keep=1, fault=fault.order())
    assert answer["error"] is not None
    assert "Input/output error" in answer["error"]
    resolved = newest_verified(run)
    assert resolved is not None
    assert resolved.passed_over == []
    assert verify(resolved.path).verdict == "ok"


def syncs_of(server: KillServer, run: Path, trace: Path) -> list[str]:
    """The paths that one save calls fsync for (the tensor files take fdatasync), in order."""
    answer = server.order(run, NEW, keep=1, trace=str(trace))
    assert answer["error"] is None
    return [op.path for op in read_trace(trace) if op.kind == "sync" and not op.path.endswith(".safetensors")]


def test_the_run_folder_cannot_be_synced(server: KillServer, run: Path, before: Path, tmp_path: Path) -> None:
    syncs = syncs_of(server, Path(shutil.copytree(before, tmp_path / "probe")), tmp_path / "trace")
    numbers = [number for number, path in enumerate(syncs, start=1) if path == str(tmp_path / "probe")]
    assert len(numbers) == 2, "after the commit, and after `latest`"
    for number in numbers:
        trial = Path(shutil.copytree(run, tmp_path / f"trial-{number}"))
        check_failed_sync(server, trial, number)


@pytest.mark.sweep
def test_every_sync_fails_once(server: KillServer, run: Path, before: Path, tmp_path: Path) -> None:
    syncs = syncs_of(server, Path(shutil.copytree(before, tmp_path / "probe")), tmp_path / "trace")
    for number in range(1, len(syncs) + 1):
        trial = Path(shutil.copytree(run, tmp_path / f"trial-{number}"))
        check_failed_sync(server, trial, number)
        shutil.rmtree(trial)


def test_latest_that_cannot_be_written_is_told_although_the_checkpoint_is_saved(server: KillServer, run: Path) -> None:
    answer = server.order(run, NEW, keep=1, fault={"call": "rename", "errno": errno.EIO, "part": "/latest"})
    assert "is saved, but what comes after went wrong" in answer["error"]
    assert verify(run / f"epoch0-global_step{NEW}").verdict == "ok"
    assert verify(run / f"epoch0-global_step{OLD}").verdict == "ok", "retention does not run then"
