"""Commands that the demo runs as processes of their own, as a user would, and what their runs have logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osora_cli.app.ckpt.verify import verify_path
from osora_cli.checkpoint.layout import STAGING_PREFIX, checkpoint_folders
from osora_cli.errors import RunError
from osora_cli.words import counted


def start(arguments: Sequence[str], *, quiet: bool) -> subprocess.Popen[bytes]:
    """`osora ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-m", "osora_cli", *arguments, *(["--quiet"] if quiet else [])]
    environment = {
        # A process that is killed cannot give back its semaphores; Python's own helper does, and says so.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
        **os.environ,
    }
    # Only the demo's own table goes to stdout.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def run_to_end(arguments: Sequence[str], *, quiet: bool) -> None:
    """The same, to its end. Raises RunError if it fails."""
    code = start(arguments, quiet=quiet).wait()
    if code != 0:
        raise RunError(f"`osora {' '.join(arguments[:2])}` ended with exit code {code}")


def kill_in_save(arguments: Sequence[str], run: Path, *, quiet: bool) -> str:
    """Start a training in the folder `run`, and kill it once a later save is on its way to the disk. What came of it.

    Raises RunError: it ended by itself.
    """
    child = start(arguments, quiet=quiet)
    try:
        staging = _wait_for_save(child, run)
    finally:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
    child.wait()
    left = len(list(run.glob(f"{STAGING_PREFIX}*")))
    good = verify_path(run).resume_from
    return (
        f"killed at update {last_step(run)} while {staging} was written, {left} unfinished save left; "
        f"resume would take {Path(good).name if good else 'nothing'}"
    )


def resume(run: Path, *, quiet: bool) -> str:
    """Go on with a run to its end. What came of it. Raises RunError where that fails, or a step stands twice."""
    before = last_step(run)
    run_to_end(["resume", str(run)], quiet=quiet)
    steps = [record["step"] for record in logged(run)]
    if len(steps) != len(set(steps)):
        raise RunError("a step stands twice in metrics.jsonl")
    return f"logged up to update {before} before, went on to update {steps[-1]}; no update stands twice"


def verify(runs: Sequence[Path]) -> str:
    """The verdict on all checkpoints of runs. Raises RunError where one does not verify."""
    count, verdicts = 0, set()
    for run in runs:
        report = verify_path(run)
        if report.exit_code:
            raise RunError("a checkpoint of the run does not verify", hint=f"osora ckpt verify {run}")
        count += len(checkpoint_folders(run))
        verdicts.add(str(report.verdict))
    return f"{counted(count, 'checkpoint')}, every byte against its digest: {', '.join(sorted(verdicts))}"


def _wait_for_save(child: subprocess.Popen[bytes], run: Path) -> str:
    while child.poll() is None:
        if len(checkpoint_folders(run) if run.is_dir() else []) >= 2:
            staging = _written_now(run)
            if staging is not None:
                return staging
        time.sleep(0.001)
    raise RunError(
        f"the training ended by itself (exit code {child.returncode}) before it could be killed in a save",
        hint=f"its log: {run / 'log.txt'}",
    )


def _written_now(run: Path) -> str | None:
    """A save that is on its way: with a file in it, for of an empty folder nobody can say yet whose it is."""
    try:
        staged = next(run.glob(f"{STAGING_PREFIX}*/**/*.safetensors"), None)
    except OSError:  # it took its name at this moment
        return None
    return None if staged is None else staged.relative_to(run).parts[0]


def records(run: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl; one that a kill cut does not count."""
    found = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def logged(run: Path) -> list[dict[str, Any]]:
    """The records of updates in metrics.jsonl."""
    return [record for record in records(run) if "kind" not in record]


def last_step(run: Path) -> int:
    """The last update in metrics.jsonl."""
    steps = logged(run)
    return int(steps[-1]["step"]) if steps else 0
