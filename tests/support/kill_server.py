"""Saves in processes that die: one process imports torch once, then forks a child for each order.

An order is one line of JSON on stdin, the answer one line on stdout. Run as a script by `KillServer`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class KillServer:
    """The side of the tests."""

    def __init__(self, preload: Path | None = None) -> None:
        tests = Path(__file__).parents[1]
        env = os.environ | {"PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
        if preload is not None:
            env["LD_PRELOAD"] = str(preload)
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def order(self, run: Path, update: int, **options: Any) -> dict[str, Any]:
        """Save `update` in a child. `die_at`: number of the phase (from 0) before which it is killed; `die_after`:
        seconds after which it is killed; `fault` and `trace`: see `io_shim`; `fsize`: longest file, bytes.
        Returns the `status` (negative: the signal), the `phases` begun, and the `error` that the save ended with.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run": str(run), "update": update, **options}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve() -> None:
    import torch
    from support import checkpoints

    import osora_cli.checkpoint.store  # noqa: F401  so that a child has nothing left to import

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        journal_read, journal_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(journal_read)
            child(order, journal_write, checkpoints)
        os.close(journal_write)
        if order.get("die_after") is not None:
            time.sleep(order["die_after"])
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(journal_read) as journal:
            told = journal.read().split("\n")
        phases = [line for line in told if line and not line.startswith("error: ")]
        error = next((json.loads(line[7:]) for line in told if line.startswith("error: ")), None)
        _, status = os.waitpid(pid, 0)
        answer = {"status": os.waitstatus_to_exitcode(status), "phases": phases, "error": error}
        print(json.dumps(answer), flush=True)


def child(order: dict[str, Any], journal: int, checkpoints: Any) -> None:
    begun = 0

    def on_phase(name: str) -> None:
        nonlocal begun
        os.write(journal, f"{name}\n".encode())
        if begun == order.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        begun += 1

    if order.get("no_exchange"):
        from osora_cli.checkpoint import fsio

        fsio.exchange = lambda first, second: False
    if order.get("fsize"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (order["fsize"], order["fsize"]))
    if order.get("fault") or order.get("trace"):
        from support.io_shim import arm

        arm(order["run"], fault=order.get("fault"), trace=order.get("trace"))
    status = 1
    try:
        checkpoints.save(
            Path(order["run"]),
            order["update"],
            async_io=order.get("async_io", True),
            keep_n_latest=order.get("keep", -1),
            buffer_bytes=32 << 10,
            on_phase=on_phase,
        )
        status = 0
    except Exception as error:
        os.write(journal, f"error: {json.dumps(str(error))}\n".encode())
    finally:
        os._exit(status)


def delay(seed: int, longest: float) -> float:
    """A moment of death."""
    return random.Random(seed).uniform(0, longest)


if __name__ == "__main__":
    serve()
