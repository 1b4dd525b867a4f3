"""What a command says: results on stdout, everything else on stderr, as text or as one JSON object."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import PurePath
from typing import Any, TypeVar

import typer

from osora_cli.cli.width import fitted, terminal_columns
from osora_cli.errors import Interrupted, OsoraError, RunError, SetupError, UsageError

SCHEMA_VERSION = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
_SETUP_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        # A folder that cannot be made or is gone, a file where a folder is meant, and the other way round.
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
    }
)

F = TypeVar("F", bound=Callable[..., Any])


class ReaderGone(Exception):
    """Whoever read stdout has closed it, as in `osora ... | head`."""


class Output:
    """Where a command's words go.

    Args:
        json_mode: results and errors as one JSON object on stdout.
        quiet: no notes; results and errors are still said.
        debug: errors with their traceback.
    """

    def __init__(self, json_mode: bool = False, quiet: bool = False, debug: bool = False) -> None:
        self.json_mode, self.quiet, self.debug = json_mode, quiet, debug

    def result(self, payload: Mapping[str, Any], text: str | Sequence[str]) -> None:
        """The outcome of the command: `payload` in JSON mode, else `text`. Of several ranks, rank 0 says it.

        A sequence of lines is fitted to a terminal's width; one text, which may be a file's, stays as it is.
        """
        if not _is_lead():
            return
        if self.json_mode:
            self._json(payload)
            return
        if not isinstance(text, str):
            text = "\n".join(fitted(text, terminal_columns()) if sys.stdout.isatty() else text)
        _to_stdout(text)

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        if not self.quiet and _is_lead():
            _to_stderr(text)

    def failure(self, error: BaseException) -> int:
        """Say what went wrong; gives the exit code. Of several ranks, one says it."""
        if self.debug and not isinstance(error, KeyboardInterrupt):
            _to_stderr("".join(traceback.format_exception(error)).rstrip())
        known = as_osora_error(error)
        if not (_is_lead() if known.speaks is None else known.speaks):
            return known.exit_code
        if self.json_mode:
            try:
                self._json({"error": _error_json(known)})
            except OSError:
                _silence_stdout()  # the disk behind stdout may be what is full: stderr says it
        head, *rest = known.lines()
        styled = _bold_red("error:") if not isinstance(known, Interrupted) else "interrupted:"
        _to_stderr("\n".join([f"{styled} {head}", *rest]))
        return known.exit_code

    def _json(self, payload: Mapping[str, Any]) -> None:
        ordered = {"schema_version": SCHEMA_VERSION, **payload}
        unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        _to_stdout(json.dumps(_jsonable(ordered), ensure_ascii=not unicode, indent=2))


def _is_lead() -> bool:
    """Whether this process speaks for all that a launcher has started: it is rank 0, or there is no launcher."""
    return os.environ.get("RANK", "0") in ("", "0")


def _error_json(error: OsoraError) -> dict[str, Any]:
    out: dict[str, Any] = {
        "message": error.message,
        "where": error.where,
        "allowed": error.allowed,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    faults = getattr(error, "to_json", None)
    if faults is not None:
        out["faults"] = faults()
    return out


def _memory_error(error: BaseException) -> RunError:
    if isinstance(error, MemoryError):
        return RunError("the machine has too little memory", hint="fewer `--num-workers`, or smaller batches")
    told = ". ".join(str(error).split(". ")[:3]).rstrip(".")  # the rest is about torch's allocator
    return RunError(
        f"the GPU has too little memory: {told}",
        hint="a training's line with `--dry-run` says what a step takes, by kind; `--grad-checkpoint` first, then "
        "smaller batches or clips in `bucket_config`, then more GPUs",
    )


def as_osora_error(error: BaseException) -> OsoraError:
    """Any exception as one with an exit code: a slip of the system is the user's to cure, the rest is ours."""
    if isinstance(error, OsoraError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("stopped by Ctrl-C", EXIT_INTERRUPTED)
    if isinstance(error, OSError) and error.errno in _SETUP_ERRNOS:
        name = f"`{error.filename}`: " if error.filename is not None else ""
        return SetupError(f"{name}{error.strerror}")
    # The second is torch's, which is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _memory_error(error)
    if hasattr(error, "format_message"):  # Typer's parser; its exception classes are private
        return _parser_error(error)
    return OsoraError(
        f"internal error: {type(error).__name__}: {error}", hint="run it again with `--debug` for the traceback"
    )


def _parser_error(error: BaseException) -> OsoraError:
    text = str(getattr(error, "format_message")()).strip().rstrip(".")  # noqa: B009  # not known to the type checker
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "osora")
    return UsageError(text[:1].lower() + text[1:], hint=f"`{path} --help` shows what the command takes")


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _to_stdout(text: str) -> None:
    try:
        typer.echo(text)
    except BrokenPipeError as error:
        raise ReaderGone from error


def _to_stderr(text: str) -> None:
    try:
        # Off a terminal Typer takes colours out, unless it is told to leave them.
        typer.echo(text, err=True, color=True if os.environ.get("FORCE_COLOR") else None)
    except OSError:
        pass  # nobody reads it, and there is nowhere else to say so


def _bold_red(text: str) -> str:
    """NO_COLOR and a terminal that knows none go before FORCE_COLOR, which stands for a terminal."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    wanted = sys.stderr.isatty() or os.environ.get("FORCE_COLOR")
    return f"\033[1;31m{text}\033[0m" if wanted and not plain else text


def guarded(command: F) -> F:
    """A command whose errors are said in the house's way and become exit codes.

    The command takes `json_mode`, `quiet` and `debug`, and returns its exit code or None.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        output = Output(*(bool(kwargs.get(name)) for name in ("json_mode", "quiet", "debug")))
        raise typer.Exit(attempt(lambda: command(*args, **kwargs), output))

    return run  # type: ignore[return-value]


def attempt(action: Callable[[], int | None], output: Output) -> int:
    """The exit code of `action`: its errors said, stdout flushed, a closed pipe passed over in silence."""
    try:
        code = _said(action, output)
        try:
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error
        except OSError as error:  # such as a full disk behind `> file`
            _silence_stdout()
            code = output.failure(error) if code == 0 else code
        return code
    except ReaderGone:
        _silence_stdout()
        return int(EXIT_BROKEN_PIPE)


def _said(action: Callable[[], int | None], output: Output) -> int:
    try:
        return action() or 0
    except ReaderGone:
        raise
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C ends the process at once, whatever is still being put away.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
        return output.failure(interrupt)
    except Exception as error:
        code = output.failure(error)
        if getattr(error, "at_once", False):
            _end_at_once(code)
        return code


def _end_at_once(code: int) -> None:
    """End the process without what Python does at its end: it would wait for a thread that is still writing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    os._exit(code)


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit: let that go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass
