"""Runs osora in a child process that kills itself at a named phase of a save, as a power cut of the process would."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """`python killing.py PHASE NTH ARGV...`: SIGKILL right before the NTH time (from 1) that PHASE begins."""
    from osora_cli.checkpoint import store
    from osora_cli.cli.main import main as osora

    phase, nth, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    assert phase in store.PHASES, (phase, store.PHASES)
    seen = 0

    def watch(name: str) -> None:
        nonlocal seen
        if name == phase:
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    original = store.CheckpointStore.__init__

    def patched(self: store.CheckpointStore, *args: object, **kwargs: object) -> None:
        kwargs["on_phase"] = watch
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    store.CheckpointStore.__init__ = patched  # type: ignore[method-assign]
    osora(argv)


if __name__ == "__main__":
    main()
