"""What a store tells its caller: the steps of a save, its events and its error. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from osora_cli.checkpoint.counters import Counters
from osora_cli.errors import RunError

# The named steps, in order. `on_phase` is called right before each; those that repeat (a file, a piece, a folder)
# once a repetition. From "create" on they run in the background in async mode.
PHASES = (
    "plan",  # tensor -> (file, offset, ranges); all ranks agree on its hash
    "space-check",  # rank 0
    "stage-folder",  # rank 0 makes the staging folder and its owner file
    "create",  # each tensor file at its full size
    "headers",  # each tensor file
    "exchange",  # bytes of pages that straddle ranks; only where there are any
    "snapshot",  # each piece: copy from the tensors into a buffer
    "write",  # each piece: hand a copied buffer to the writer
    "fdatasync",  # each tensor file, with its close
    "report",  # ranges, bytes and digests, or the error, of each rank
    "cover-check",  # rank 0: every byte written exactly once
    "small-files",  # each: indexes, groups, schedules, RNG states, log, running_states.json
    "manifest",
    "fsync-folders",
    "replace",  # a checkpoint of that name exists: it goes to `.trash-*`
    "commit-rename",
    "fsync-run",
    "latest",
    "retention",
    "trash",  # each folder: renamed to `.trash-*`, then deleted
)


@dataclass(frozen=True)
class SaveEvent:
    """One thing that happened to a checkpoint, delivered in the caller's thread.

    Attributes:
        kind: "submitted" (in flight), "committed" (durable under its final name), "failed", "removed" (by retention;
            with `error` set, it could not be removed).
        path: the checkpoint's final name.
        counters: of the save; None for "removed".
        bytes: size of the checkpoint, all files and ranks.
        seconds: from the call of save() to the end.
        stall_seconds: how long the training waited: for the save before, for the copy, for the event.
        gb_per_s: 1e9 bytes a second over `seconds`.
        error: what went wrong.
    """

    kind: Literal["submitted", "committed", "failed", "removed"]
    path: Path
    counters: Counters | None = None
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    error: str | None = None

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Saved:
    """What a store has saved when nobody waits for it any more.

    Attributes:
        update: of the newest checkpoint that it has published; None: none.
        unknown: of a save that was about to be published: it may be there or not.
    """

    update: int | None
    unknown: int | None = None


class SaveError(RunError):
    """A save failed. What was saved before is untouched."""


@dataclass
class Stall:
    """Seconds that the training waited for one save."""

    seconds: float = 0.0
    device_events: list[tuple[object, object]] = field(default_factory=list)
