"""Runs the real command line as several ranks, each forked from the server of `support.process`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.process import Finished, start


@dataclass(frozen=True)
class Rank:
    """A rank that was started: its process and what it writes."""

    process: BaseProcess
    out: Path
    err: Path

    def finish(self, timeout: float = 120.0) -> Finished:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"a rank did not end in {timeout:.0f} s: {self.err.read_text()[-2000:]}")
        return Finished(self.process.exitcode, self.out.read_text(), self.err.read_text())


def start_ranks(world_size: int, *argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> list[Rank]:
    """`osora ARGV...` as ranks, without a launcher that looks after them: rank 0 keeps the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(Rank(*start(*argv, cwd=cwd, env={**place, **(env or {})})))
    return ranks


def run_ranks(world_size: int, *argv: str | Path, cwd: Path) -> list[Finished]:
    """The same, to the end of all."""
    return [rank.finish() for rank in start_ranks(world_size, *argv, cwd=cwd)]


def wait_until(done: Callable[[], bool], timeout: float = 90.0) -> None:
    until = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.05)
