"""Writing tables so that nobody sees half of one: a temporary file beside the target, synced, then renamed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from osora_cli.data.meta import MetaTable
from osora_cli.data.text_table import PARQUET
from osora_cli.errors import DataError, SetupError, UsageError

# What is read for one clip with `memory_efficient`. Of a table so large that its footer would be, groups are larger.
_GROUP_ROWS, _GROUPS = 1000, 10_000
_QUOTED = frozenset(',"\r\n')


def check_output(output: Path, endings: Sequence[str] = (".csv", *PARQUET)) -> None:
    """Refuses an output that could not be written, before any work is done, and makes its folder.

    Raises:
        UsageError: it is a folder, or its extension is not one of `endings`.
        SetupError: its folder cannot be made or written.
    """
    if output.is_dir():
        raise UsageError(f"output `{output}` is a folder", allowed=f"a file ending in {' or '.join(endings)}")
    if output.exists() and not output.is_file():
        raise UsageError(f"output `{output}` is no regular file", allowed="a file, or a name that is free")
    if output.suffix.lower() not in endings:
        kind = "neither CSV nor parquet" if len(endings) > 1 else "no CSV"
        raise UsageError(f"output `{output}` is {kind} by its name", allowed=", ".join(endings))
    for folder in dict.fromkeys((output.parent, Path(os.path.realpath(output)).parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"folder `{folder}` cannot be made: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SetupError(f"folder `{folder}` cannot be written to", hint="choose another --output")


def check_cells(table: MetaTable, output: Path) -> None:
    """Refuses what parquet holds and a CSV cannot.

    Raises:
        DataError: a cell has a zero byte, and `output` is a CSV.
    """
    if output.suffix.lower() in PARQUET:
        return
    for name in table.names:
        row = next((row for row, text in enumerate(table.as_text(name)) if "\0" in text), None)
        if row is not None:
            raise DataError(
                f"`{name}` of row {row} holds a zero byte, which no CSV can",
                hint=f"--output {output.with_suffix(PARQUET[0])}",
            )


def write_meta_table(table: MetaTable, output: Path) -> None:
    """Writes all columns, as CSV (UTF-8, commas, LF) or parquet by the output's extension.

    Raises:
        SetupError: no space, or no right to write; the old file is untouched then.
    """
    if output.suffix.lower() in PARQUET:
        arrays = [table.as_array(name) for name in table.names]
        with replaced(output) as file:
            rows = max(_GROUP_ROWS, -(-len(table) // _GROUPS))
            pq.write_table(pa.Table.from_arrays(arrays, names=table.names), file, row_group_size=rows)
    else:
        write_csv(output, table.names, [table.as_text(name) for name in table.names])


def write_csv(output: Path, names: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    """Writes columns of text. Fields are quoted where a reader could else take them for more than one."""
    write_csv_rows(output, names, zip(*columns, strict=True))


def write_csv_rows(output: Path, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes rows of text as they come.

    Raises:
        SetupError: no space, or no right to write.
    """
    with replaced(output) as file:
        file.write(_line(names))
        for row in rows:
            file.write(_line(row))


def _line(fields: Iterable[str]) -> bytes:
    return (",".join(map(_field, fields)) + "\n").encode("utf-8")


def _field(text: str) -> str:
    if _QUOTED.isdisjoint(text):
        return text
    return '"' + text.replace('"', '""') + '"'


@contextmanager
def replaced(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `target` when the block ends well, and is gone when it does not.

    Of a link, what it leads to is replaced. Who may read an old file may read the new one, and nobody else.

    Raises:
        SetupError: no space, or no right to write.
    """
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        space = "no space left for it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise SetupError(f"`{target}` cannot be written: {space}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
