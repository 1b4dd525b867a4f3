"""What an observer of a run is. Observers see numbers and texts; they cannot change the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunStart:
    """What is known of a run when its loop begins.

    Attributes:
        folder: the run's folder.
        start_update: optimizer updates already done: 0, or the number of the checkpoint that is gone on from. All
            records beyond it are of a past that did not happen, and are cut back.
        total_updates: updates that the run will have done in the end, where that is known.
        config: the resolved config, plain values.
    """

    folder: Path
    start_update: int = 0
    total_updates: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


class SaveCounters(Protocol):
    """Where the run stood when it was saved: `actual_update_step` is the number in the checkpoint's name."""

    @property
    def epoch(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def actual_update_step(self) -> int: ...


class SaveEvent(Protocol):
    """One thing that happened to a checkpoint, as `checkpoint.events.SaveEvent` has it (which is not imported here).

    `kind` is `submitted` (the state is copied, its writing has begun), `committed` (the checkpoint stands under its
    name), `failed`, or `removed` (by retention). `counters` is None for `removed`; `stall_seconds` is how long the
    training stood still for this save; `error` says what went wrong.
    """

    @property
    def kind(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def counters(self) -> SaveCounters | None: ...

    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def stall_seconds(self) -> float: ...

    @property
    def error(self) -> str | None: ...


class Observer(Protocol):
    """Told of a run in this order: on_start, then any of the middle four, then close (once, also after an error).

    Events alone may come before on_start: what is said while there is no network yet.
    """

    def on_start(self, info: RunStart) -> None:
        """The loop is about to begin. Errors here (no space, no permission) end the run before it has begun."""

    def on_update(self, record: Record) -> None:
        """An update is done: its counters and learning rate only, so that nothing waits for the device."""

    def on_log(self, record: Record) -> None:
        """A logged update: `step`, `epoch`, `loss`, `lr`, `grad_norm`, `samples`, times; plain Python values."""

    def on_event(self, kind: str, text: str, data: Record) -> None:
        """Something worth a line: kind `note`, `warning` or `error`."""

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        """The networks were scored after `update` updates; pictures are uint8 [H, W, 3] by name."""

    def on_save(self, event: SaveEvent) -> None:
        """A checkpoint was submitted, committed, given up or removed."""

    def close(self) -> None:
        """The run is over; write what is left. May be called again."""


class SilentObserver:
    """Does nothing with anything: the base of observers that care for some of it."""

    def on_start(self, info: RunStart) -> None: ...

    def on_update(self, record: Record) -> None: ...

    def on_log(self, record: Record) -> None: ...

    def on_event(self, kind: str, text: str, data: Record) -> None: ...

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None: ...

    def on_save(self, event: SaveEvent) -> None: ...

    def close(self) -> None: ...


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")


class ObserverGroup:
    """Several observers as one. One that fails while the run goes on is named once and left out; the run goes on.

    Errors of `on_start` are raised: nothing is lost by then, and the user can act on them.

    Args:
        observers: told in this order.
        complain: where the one line about a failed observer goes.
    """

    def __init__(self, observers: Sequence[Observer], complain: Callable[[str], None] = _to_stderr) -> None:
        self._observers = list(observers)
        self._complain = complain

    def on_start(self, info: RunStart) -> None:
        for observer in self._observers:
            observer.on_start(info)

    def on_update(self, record: Record) -> None:
        self._each(lambda o: o.on_update(record))

    def on_log(self, record: Record) -> None:
        self._each(lambda o: o.on_log(record))

    def on_event(self, kind: str, text: str, data: Record) -> None:
        self._each(lambda o: o.on_event(kind, text, data))

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        self._each(lambda o: o.on_evaluation(update, scores, pictures))

    def on_save(self, event: SaveEvent) -> None:
        self._each(lambda o: o.on_save(event))

    def close(self) -> None:
        self._each(lambda o: o.close())

    def _each(self, tell: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            try:
                tell(observer)
            except Exception as error:
                # A full disk or a lost connection must not cost the run; the checkpoints are another matter.
                self._observers.remove(observer)
                name = type(observer).__name__
                reason = f"{type(error).__name__}: {error}"
                self._complain(f"warning: {name} stopped, the run goes on without it: {reason}")
                _close_quietly(observer)


def _close_quietly(observer: Observer) -> None:
    try:
        observer.close()
    except Exception:  # it has failed before and was named then
        return
