"""`osora data meta`: from a table of paths and captions, or a folder, to the table that training reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from osora_cli.data.meta import MetaTable, load_meta_table, settle
from osora_cli.data.meta_journal import Journal
from osora_cli.data.meta_merge import merge_table
from osora_cli.data.meta_output import check_cells, check_output, write_csv, write_meta_table
from osora_cli.data.meta_workers import Look, look_at
from osora_cli.errors import DataError, UsageError

OnError = Literal["skip", "keep", "fail"]
_SHOWN = 5


@dataclass(frozen=True)
class MetaResult:
    """What was made.

    Attributes:
        rows: rows of the output.
        bad: (path as written, reason) of every row whose file cannot be used, in the table's order.
        output: the table written.
        seconds: taken in all.
        bad_report: a CSV of `bad` beside the output, or None when there is nothing to report.
        probed: files that were looked at, or had been by an interrupted run; the other rows needed none.
        notes: what a reader should know about how the input was taken.
    """

    rows: int
    bad: list[tuple[str, str]]
    output: Path
    seconds: float
    bad_report: Path | None
    probed: int
    notes: tuple[str, ...]


def make_meta(
    input: Path,
    output: Path,
    *,
    num_workers: int = 0,
    root: Path | None = None,
    exact: bool = False,
    merge: Sequence[Path] = (),
    on_error: str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> MetaResult:
    """Fills `path, text, num_frames, height, width, aspect_ratio, resolution, fps`, and keeps everything else.

    Columns and rows keep their order, values that are there are kept (with `exact` all six are measured anew), and
    running it on its own output changes nothing. `output` may be `input`. The result does not depend on
    `num_workers`. An interrupted run goes on where it was.

    Args:
        input: a CSV or parquet table with a column `path`, or a folder, searched for videos and stills to any depth.
            Of a folder, files are written relative to the output's folder where they lie below it, else absolute.
        output: .csv, .parquet or .pq.
        num_workers: processes that pandarallel drives; 0 and 1 work in this one.
        root: where relative paths are tried last, after the working directory and the table's folder.
        exact: decode everything, and count the frames up to the first damage.
        merge: tables whose columns are joined by path, one after the other, see `merge_table`.
        on_error: what becomes of a row whose file cannot be used: `skip` leaves it out, `keep` leaves its values
            empty, `fail` ends without output. None is `skip`, unless `output` is `input`: a table that is written over
            itself loses no row that was not given up in so many words.
        time_limit_s: seconds that one file may take.
        progress: called with the number of files done and of all.

    Raises:
        DataError: the input cannot be read, no file is usable, or one is not and `on_error` is `fail`. Nothing is
            written.
        UsageError: the output's name, `on_error`, `num_workers` or `time_limit_s` is not allowed.
        SetupError: the output cannot be written, or processes cannot be started.
    """
    began = time.perf_counter()
    in_place = input.resolve() == output.resolve()
    _check(on_error, num_workers, time_limit_s)
    check_output(output)
    if any(source.resolve() == output.resolve() != input.resolve() for source in merge):
        raise UsageError(f"output `{output}` is one of the tables to merge", hint="choose another --output")
    table = load_meta_table(input, output, root)
    for source in merge:
        merge_table(table, source)
    check_cells(table, output)
    probed = table.to_probe(exact=exact)
    files = list(dict.fromkeys(file for row in probed if (file := table.files[row]) is not None))
    with Journal(output, exact=exact) as journal:
        found = look_at(files, Look(exact, time_limit_s, num_workers), journal, progress)
        faults = settle(table, found, probed, exact=exact)
        bad = [(table.path[row], reason) for row, reason in faults]
        _refuse(input, table, bad, on_error)
        if faults and on_error is None and in_place:
            journal.stay()  # the files need not be looked at again when it is said what to do
            raise _would_lose(input, bad, len(table))
        if faults and on_error in (None, "skip"):
            dropped = {row for row, _ in faults}
            table.keep([row for row in range(len(table)) if row not in dropped])
        write_meta_table(table, output)
        report = _report(output, bad, in_place=in_place)
    return MetaResult(
        rows=len(table),
        bad=bad,
        output=output,
        seconds=time.perf_counter() - began,
        bad_report=report,
        probed=len(files),
        notes=tuple(table.notes),
    )


def _check(on_error: str | None, num_workers: int, time_limit_s: float) -> None:
    if on_error is not None and on_error not in get_args(OnError):
        raise UsageError(f"on_error is `{on_error}`", allowed=", ".join(get_args(OnError)))
    if num_workers < 0:
        raise UsageError(f"num_workers is `{num_workers}`", allowed="0 or more")
    if not time_limit_s > 0:
        raise UsageError(f"time limit is `{time_limit_s}` s", allowed="above 0 s")


def _refuse(input: Path, table: MetaTable, bad: list[tuple[str, str]], on_error: str | None) -> None:
    """Ends without output when nothing is usable, or when one bad file is to end the run."""
    if not bad or (len(bad) < len(table) and on_error != "fail"):
        return
    usable = len(table) - len(bad)
    what = f"{len(bad)} of {len(table)} files of `{input}` cannot" if usable else f"no file of `{input}` can"
    missing = any(reason == "no such file" for _, reason in bad)
    raise DataError(
        f"{what} be used: {_named(bad)}",
        hint="relative paths are tried from the working directory, the table's folder and --root" if missing else None,
    )


def _would_lose(input: Path, bad: list[tuple[str, str]], rows: int) -> DataError:
    return DataError(
        f"{len(bad)} of {rows} files of `{input}` cannot be used, and without their rows the table would be written "
        f"over itself: {_named(bad)}",
        hint="`--on-error skip` leaves these rows out, `--on-error keep` leaves their values empty; or give another "
        "--output",
    )


def _named(bad: list[tuple[str, str]]) -> str:
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return "; ".join(f"`{path}`: {reason}" for path, reason in bad[:_SHOWN]) + more


def _report(output: Path, bad: list[tuple[str, str]], *, in_place: bool) -> Path | None:
    """Writes the report of bad files. With none, one of an earlier run goes, unless the table is that run's own."""
    report = output.with_name(f"{output.stem}.bad.csv")
    if not bad:
        if not in_place:
            report.unlink(missing_ok=True)
        return None
    paths = [path.encode("utf-8", "backslashreplace").decode("utf-8") for path, _ in bad]
    write_csv(report, ("path", "reason"), (paths, [reason for _, reason in bad]))
    return report
