"""One rank's failure is every rank's: words left in the store, signs of life, and a thread that reads them.

A rank that waits in a collective cannot be told anything; its thread ends the process for it. The rank that failed
first speaks, the others keep silent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from osora_cli.engine.ranks import Ranks

_FAILED = "failed"
_LOOK_S = 1.0
BEAT_S = 3.0
DEAD_AFTER_S = 30.0
GRACE_S = 5.0  # for a rank to come out of its collective by itself
HEARD_S = 15.0


@dataclass(frozen=True)
class Failure:
    """What a rank left behind: its number, the update it was in, the exit code and its words."""

    rank: int
    update: int
    exit_code: int
    message: str


class Watch:
    """Watches over the ranks of a run.

    Args:
        ranks: with a store.
        timeout_s: longest time without an update or another sign of progress; then the run is ended.
        on_end: what ends this process, gets the exit code; None: `os._exit`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, on_end: Callable[[int], object] | None = None) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._on_end = on_end or os._exit
        self._update = 0
        self._moved: float | None = None
        self._stopped = threading.Event()
        self._found: Failure | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._look, name="osora-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """From here on nobody is missed."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_S)

    def progress(self, update: int | None) -> None:
        """This rank moves; `update` updates are done. None: what comes may take any time (a save, an evaluation)."""
        self._moved = None
        if update is not None:
            self._update, self._moved = update, time.monotonic()

    @property
    def update(self) -> int:
        return self._update

    def post(self, message: str, exit_code: int) -> bool:
        """Leave word that this rank has failed. Gives whether it was the first to."""
        own = json.dumps(asdict(Failure(self._ranks.rank, self._update, exit_code, message)))
        return self._post(own)

    def _post(self, failure: str) -> bool:
        store = self._ranks.store
        if store is None:
            return True
        try:
            return store.compare_set(_FAILED, "", failure).decode() == failure
        except RuntimeError:  # whoever held the store is gone
            return True

    def failure(self, wait_s: float = 0.0) -> Failure | None:
        """What failed first, if any rank has left word; waits for it up to `wait_s` seconds."""
        until = time.monotonic() + wait_s
        while True:
            found = self._read()
            if found is not None or time.monotonic() >= until:
                return found
            time.sleep(0.1)

    def _read(self) -> Failure | None:
        store = self._ranks.store
        if store is None or self._found is not None:
            return self._found
        with suppress(RuntimeError):
            if store.check([_FAILED]):
                # Kept before it is acknowledged: from then on the store may be gone.
                self._found = Failure(**json.loads(store.get(_FAILED)))
                store.set(f"heard-{self._ranks.rank}", "")
        return self._found

    def wait_until_heard(self) -> None:
        """Rank 0 may keep the store: it stays until the others have read what failed, or `HEARD_S` have passed."""
        store, until = self._ranks.store, time.monotonic() + HEARD_S
        if store is None or not self._ranks.is_lead:
            return
        keys = [f"heard-{rank}" for rank in range(1, self._ranks.world_size)]
        with suppress(RuntimeError):
            while not store.check(keys) and time.monotonic() < until:
                time.sleep(0.1)

    def silent_ranks(self) -> list[int]:
        """Ranks that gave no sign of life for as long as this one has listened, at least `DEAD_AFTER_S`."""
        now = time.monotonic()
        return [rank for rank, (_, at) in self._seen.items() if now - at > DEAD_AFTER_S]

    # -- the thread ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        beaten = 0.0
        while not self._stopped.wait(_LOOK_S):
            failed = self._read()
            if failed is not None:
                self._end_after(failed)
                return
            if time.monotonic() - beaten >= BEAT_S:
                beaten = time.monotonic()
                if not self._beat():
                    self._end_alone("the rank that keeps the store (rank 0) is gone")
                    return
            missing = self.silent_ranks()
            if missing:
                self._end_alone(f"{_named(missing)} gave no sign of life for {DEAD_AFTER_S:.0f} s")
                return
            moved = self._moved
            if moved is not None and time.monotonic() - moved > self._timeout_s:
                self._end_alone(f"no progress for {self._timeout_s:.0f} s: it waits for another rank, or hangs")
                return

    def _beat(self) -> bool:
        """Show that this rank lives, and look at the others: rank 0 at all, all at rank 0."""
        store, now = self._ranks.store, time.monotonic()
        assert store is not None
        try:
            store.set(f"beat-{self._ranks.rank}", str(now))
            for rank in range(1, self._ranks.world_size) if self._ranks.is_lead else [0]:
                beat = store.get(f"beat-{rank}") if store.check([f"beat-{rank}"]) else b""
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = (beat, now)
        except RuntimeError:
            return False
        return True

    def _end_alone(self, what: str) -> None:
        """Nobody has said why: this rank does."""
        update = self._update
        message = f"rank {self._ranks.rank} of {self._ranks.world_size}, in update {update + 1}: {what}"
        if self._stopped.wait(_LOOK_S if self._ranks.is_lead else 2 * _LOOK_S):
            return
        if self.post(message, 1):
            record = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
            told = f"\n  where: NCCL's record of the last collectives, {record}*" if record else ""
            sys.stderr.write(f"error: {message}{told}\n")
        self._end(1)

    def _end_after(self, failed: Failure) -> None:
        own = failed.rank == self._ranks.rank  # it has a message to say
        if not self._stopped.wait(HEARD_S + GRACE_S if own else GRACE_S):
            self._end(failed.exit_code or 1)

    def _end(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._on_end(code)


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
