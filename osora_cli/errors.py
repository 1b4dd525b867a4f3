"""The errors a user can cause or meet, each with its exit code.

A message says what is wrong, with the value. `where` says where that came from (a file and line, or a flag),
`allowed` what would have been right, and `hint` is the command or change that cures it. The command line prints
them without a traceback; the codes are part of the interface (docs/troubleshooting.md).
"""

from __future__ import annotations


class OsoraError(Exception):
    """Base of all errors that osora raises on purpose. `exit_code` is what the process ends with."""

    exit_code = 1
    speaks: bool | None = None
    """Whether this process is the one of several to say it; None: not known, then rank 0 says it."""

    def __init__(
        self, message: str, *, where: str | None = None, allowed: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.allowed = allowed
        self.hint = hint

    def lines(self) -> list[str]:
        """The message and, a line each, what is known of origin, allowed values and cure."""
        out = [self.message]
        out += [
            f"  {label}: {text}"
            for label, text in (("where", self.where), ("allowed", self.allowed), ("fix", self.hint))
            if text
        ]
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


class RunError(OsoraError):
    """The run itself failed: non-finite losses, a save that failed, a lost rank."""

    exit_code = 1


class UsageError(OsoraError):
    """Wrong command line or config: unknown key, wrong type, a run that exists, data that are not the checkpoint's."""

    exit_code = 2


class ConfigError(UsageError):
    """The config is wrong. All faults of one config are collected into one error."""


class DataError(OsoraError):
    """Table missing or unreadable, columns missing, no usable clip, an empty bucket."""

    exit_code = 3


class CheckpointError(OsoraError):
    """A checkpoint is missing, incomplete, damaged or of another model."""

    exit_code = 4


class SetupError(OsoraError):
    """The environment lacks something: an extra, weights, a GPU, disk space, the right to write."""

    exit_code = 5


class Interrupted(OsoraError):
    """SIGINT or SIGTERM, after a clean save. `exit_code` is 130 or 143.

    With `at_once` nothing is waited for, not even a save under way: the process ends once this is said.
    """

    def __init__(self, message: str, exit_code: int, *, hint: str | None = None, at_once: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.at_once = at_once


class Followed(OsoraError):
    """Another rank failed and says why; this one only ends with it, with the same exit code."""

    speaks = False

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
