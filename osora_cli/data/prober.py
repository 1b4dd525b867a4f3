"""Probes files through a child process that is replaced when it hangs or dies."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any

from osora_cli.errors import SetupError

# Starting Python and FFmpeg on a busy machine or a cold network disk.
_START_LIMIT_S = 120.0
_START_TRIES = 3
_START_PAUSE_S = 1.0
# A new child now and then keeps what libraries leak from adding up.
_FILES_PER_CHILD = 5000
_KILL_WAIT_S = 5.0
# The system takes no wait of any length: one without end is made of many.
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True)
class Facts:
    """What is known of one file: the numbers, or why there are none."""

    num_frames: int = 0
    height: int = 0
    width: int = 0
    fps: float | None = None
    reason: str | None = None


class Prober:
    """Looks at one file at a time, with a time limit for each. A context manager, or `close` it.

    Args:
        exact: decode every file.
        time_limit_s: seconds a file may take before it is given up.
    """

    def __init__(self, *, exact: bool = False, time_limit_s: float = 60.0) -> None:
        self._exact = exact
        self._limit = time_limit_s
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, if one runs."""
        return None if self._child is None else self._child.process.pid

    def probe(self, path: str) -> Facts:
        """The facts of a file. A file that hangs or kills its reader gives a reason.

        Raises:
            SetupError: a child process cannot be started.
        """
        if self._child is not None and self._child.is_spent():
            self.close()
        if self._child is None:
            self._child = _start_child()
        answer = self._child.ask({"path": path, "exact": self._exact}, self._limit)
        if isinstance(answer, str):
            reason = self._child.why_gone(answer)
            self.close()
            return Facts(reason=reason)
        if "error" in answer:
            return Facts(reason=answer["error"])
        return Facts(*answer["info"])

    def close(self) -> None:
        """Ends the child. The next file starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _NotStarted(SetupError):
    """A child that did not begin to serve; `killed`: a signal ended it, as when memory runs out."""

    def __init__(self, message: str, *, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


def _start_child() -> _Child:
    """A child that serves. One that is killed while it starts is no reason to end hours of work: another is tried."""
    for left in reversed(range(_START_TRIES)):
        try:
            return _Child()
        except _NotStarted as error:
            if not error.killed or not left:
                raise
            time.sleep(_START_PAUSE_S)
    raise AssertionError("unreachable")


class _Child:
    """One child process and the two pipes to it."""

    def __init__(self) -> None:
        self.served = 0
        # The same modules as here, whatever the working directory holds.
        code = f"import sys; sys.path[:] = {sys.path!r}; from osora_cli.data.probe_child import main; main()"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._pending = b""
        started = self._receive(time.monotonic() + _START_LIMIT_S)
        if isinstance(started, str):
            reason = self.why_gone(started)
            said, killed = self._last_words(), (self.process.returncode or 0) < 0
            self.end()
            message = f"the process that looks at files could not be started: {reason}{said}"
            raise _NotStarted(message, killed=killed)

    def is_spent(self) -> bool:
        """Whether another child should take over: it has served long enough, or is gone."""
        return self.served >= _FILES_PER_CHILD or self.process.poll() is not None

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any] | str:
        """The answer, or `slow` or `gone`."""
        self.served += 1
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError:
            return "gone"
        answer = self._receive(time.monotonic() + limit_s)
        return f"took longer than {limit_s:g} s" if answer == "slow" else answer

    def _receive(self, deadline: float) -> dict[str, Any] | str:
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return "slow"
            if not self._selector.select(min(left, _LONGEST_WAIT_S)):
                continue
            data = self._answers.read1(65536)  # type: ignore[attr-defined]
            if not data:
                return "gone"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def why_gone(self, answer: str) -> str:
        """Words for an answer that did not come."""
        if answer != "gone":
            return answer
        try:
            code = self.process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return "the process that read it closed its pipe"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return f"the process that read it was ended by {name}"
        return f"the process that read it ended with code {code}"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""

    def end(self) -> None:
        self._selector.close()
        self.process.kill()
        for pipe in (self._requests, self._answers, self._log):
            try:
                pipe.close()
            except OSError:
                pass
        try:
            self.process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            pass  # stuck in the system, on a dead disk: it goes when that answers
