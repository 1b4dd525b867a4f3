"""How the ranks of a save talk: small objects only, never tensors of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")


class Comm(Protocol):
    """What the store needs of a process group.

    All ranks make the same calls in the same order; those of one save come from one thread at a time. Plain objects
    that pickle-free transports can carry: numbers, strings, bytes, lists, tuples and dicts of them.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        ...


class SingleComm:
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        return [value]


class RemoteError(RuntimeError):
    """Another rank failed; the message is its own."""


SINGLE: Comm = SingleComm()


def together(comm: Comm, step: Callable[[], T]) -> list[T]:
    """Run a step on every rank; returns the results of all, in rank order.

    Raises:
        Exception: this rank's own error; where another rank failed, a `RemoteError` with its message.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    outcomes = comm.gather((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise RemoteError(f"rank {rank}: {message}")
    return [cast(T, value) for value, _ in outcomes]


def agree(comm: Comm, what: str, value: Any) -> None:
    """All ranks must hold the same value.

    Raises:
        ValueError: they do not; names the ranks, on every rank.
    """
    values = comm.gather(value)
    if any(other != values[0] for other in values):
        listed = ", ".join(f"rank {rank}: `{other}`" for rank, other in enumerate(values))
        raise ValueError(f"the ranks disagree on {what}: {listed}")
