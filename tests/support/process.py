"""Runs the real command line in real child processes, and kills them at a chosen place.

The children are forked from a server that has the heavy imports done and no threads, so that a start costs
milliseconds and not seconds. Each is a process of its own with its own pid: SIGKILL there is what it is anywhere.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# torch imports its compiler's front end with the first optimizer; that alone takes a second.
_PRELOAD = [
    "torch._dynamo",
    "osora_cli.cli.main",
    "osora_cli.app.train",
    "osora_cli.app.resume",
    "osora_cli.app.ckpt.verify",
    "osora_cli.app.reconstruct.run",
    "osora_cli.model.dc_ae.autoencoder",
]


@dataclass(frozen=True)
class Kill:
    """SIGKILL at a place: before the `nth` time that a save reaches `phase`, or after update `step` was logged."""

    phase: str | None = None
    nth: int = 1
    step: int | None = None


@dataclass(frozen=True)
class Hold:
    """A disk that takes its time: each save stops before the `nth` time that it reaches `phase`, until `gate` is there.

    `phase` may be "pwrite" too: then each of the writer's threads stops before a write. `reached` is made when the
    first stops.
    """

    phase: str
    reached: Path
    gate: Path
    nth: int = 1
    after: int = 0
    """So many saves go through first."""


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code (negative: the signal that ended it), and what it wrote."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        data = json.loads(self.stdout)
        assert isinstance(data, dict)
        return data


def osora(*argv: str | Path, cwd: Path, kill: Kill | None = None, env: dict[str, str] | None = None) -> Finished:
    """`osora ARGV...` in the folder `cwd`, to its end."""
    process, out, err = start(*argv, cwd=cwd, kill=kill, env=env)
    process.join()
    assert process.exitcode is not None
    return Finished(process.exitcode, out.read_text(), err.read_text())


def start(
    *argv: str | Path, cwd: Path, kill: Kill | Hold | None = None, env: dict[str, str] | None = None
) -> tuple[BaseProcess, Path, Path]:
    """`osora ARGV...` begun: the process, and the files that its stdout and stderr go to."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    number = len(list(cwd.glob(".stdout-*")))
    out, err = cwd / f".stdout-{number}", cwd / f".stderr-{number}"
    out.touch()
    process = context.Process(target=_child, args=([str(a) for a in argv], str(cwd), out, err, kill, env or {}))
    process.start()
    return process, out, err


def _child(argv: Sequence[str], cwd: str, out: Path, err: Path, kill: Kill | Hold | None, env: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    import torch

    torch.set_num_threads(1)
    if isinstance(kill, Hold):
        _hold(kill)
    elif kill is not None:
        _arm(kill)
    from osora_cli.cli.main import main

    sys.argv = ["osora", *argv]
    try:
        main()
    finally:
        sys.stdout.flush()


def _arm(kill: Kill) -> None:
    def die() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if kill.phase is not None:
        _arm_phase(kill.phase, kill.nth, die)
    if kill.step is not None:
        _arm_step(kill.step, die)


def _arm_phase(phase: str, nth: int, die: Callable[[], None]) -> None:
    seen = 0

    def watch(name: str) -> None:
        nonlocal seen
        seen += name == phase
        if name == phase and seen == nth:
            die()

    _watch_phases(phase, watch)


def _hold(hold: Hold) -> None:
    saves, seen = 0, 0

    def wait() -> None:
        hold.reached.touch()
        while not hold.gate.exists():
            time.sleep(0.005)

    def watch(name: str) -> None:
        nonlocal saves, seen
        saves, seen = (saves + 1, 0) if name == "plan" else (saves, seen)
        seen += name == hold.phase
        if name == hold.phase and seen == hold.nth and saves > hold.after:
            wait()

    _watch_phases("write" if hold.phase == "pwrite" else hold.phase, watch)
    if hold.phase == "pwrite":
        from osora_cli.checkpoint.writer import threads

        original = threads.write_range

        def slow(*args: Any) -> Any:
            if saves > hold.after:
                wait()
            return original(*args)

        threads.write_range = slow


def _watch_phases(phase: str, watch: Callable[[str], None]) -> None:
    from osora_cli.checkpoint import events, store

    assert phase in events.PHASES, f"`{phase}` is none of {events.PHASES}"
    original = store.CheckpointStore.__init__

    def init(self: store.CheckpointStore, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "on_phase": watch})

    store.CheckpointStore.__init__ = init  # type: ignore[method-assign]


def _arm_step(step: int, die: Callable[[], None]) -> None:
    from osora_cli.report.jsonl import MetricsFile

    original = MetricsFile.on_log

    def on_log(self: MetricsFile, record: Any) -> None:
        original(self, record)
        if record["step"] == step:
            die()

    MetricsFile.on_log = on_log  # type: ignore[method-assign]
