"""Tables as text: CSV and parquet read into string columns with nothing guessed, nothing shifted, nothing dropped.

Captions and paths are whatever was written ("None", "NA", "007"). A row that does not fit the header is refused with
its line number. UTF-8 with or without a byte order mark; other delimiters than the comma are recognised and said.
"""

from __future__ import annotations

import csv
import gc
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from osora_cli.data.media_types import STILL_EXTENSIONS, VIDEO_EXTENSIONS
from osora_cli.errors import DataError

if TYPE_CHECKING:
    from _csv import Reader as _CsvReader

COLUMNS = ("path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps")
PARQUET = (".parquet", ".pq")
DELIMITERS = (",", ";", "\t", "|")
_DELIMITER_NAMES = {"\t": "tab"}
_CHUNK = 1_000
_SHOWN_CHARACTERS = 60
# A caption may be longer than the 131072 characters at which the csv module takes a field for one without end.
_LONGEST_FIELD = 2**31 - 1


@dataclass
class TextTable:
    """Columns of a table in file order.

    Attributes:
        source: the file, for messages.
        names: every column of the file, in order.
        columns: the columns that were asked for, as large_string arrays (CSV) or in their stored type (parquet).
        num_rows: rows, the header not counted.
        notes: what a reader should know about how the file was taken.
        delimiter: of a CSV; None for parquet.
    """

    source: Path
    names: list[str]
    columns: dict[str, pa.Array]
    num_rows: int
    notes: list[str] = field(default_factory=list)
    delimiter: str | None = None

    def where(self, row: int) -> str:
        """Where a row, counted from 0, stands in the file: its line in a CSV, else its number."""
        if self.delimiter is None:
            return f"{self.source}, row {row} (the first is row 0)"
        for number, (line, _) in enumerate(_records(self.source, self.delimiter)):
            if number == row + 1:
                return f"{self.source}:{line}"
        return str(self.source)


def read_text_table(path: str | os.PathLike[str], columns: Collection[str] | None = None) -> TextTable:
    """Reads a CSV or, by its extension, a parquet file.

    Args:
        path: the table.
        columns: names to load; None loads all. Names that the file lacks are left to the caller.

    Raises:
        DataError: no such file, not that format, not UTF-8, a ragged row, a name used twice, no header.
    """
    source = Path(path)
    if not source.exists():
        raise DataError(
            f"table `{source}` does not exist",
            hint="osora data meta --input FOLDER --output TABLE.csv makes one of the clips of a folder",
        )
    if not source.is_file():
        folder = f"osora data meta --input {source} --output TABLE.csv makes a table of the clips of a folder"
        raise DataError(
            f"table `{source}` is not a file",
            allowed="a CSV or parquet file",
            hint=folder if source.is_dir() else None,
        )
    if source.suffix.lower() in PARQUET:
        return _read_parquet(source, columns)
    if source.suffix.lower() in STILL_EXTENSIONS | VIDEO_EXTENSIONS:
        raise DataError(
            f"`{source}` is a clip, not a table",
            allowed="a CSV or parquet table with a column `path`",
            hint="osora data meta --input FOLDER --output TABLE.csv makes one of all clips of a folder",
        )
    return _read_csv(source, columns)


def _read_parquet(source: Path, columns: Collection[str] | None) -> TextTable:
    try:
        with pq.ParquetFile(source) as opened:
            names = list(opened.schema_arrow.names)
            _check_header(source, names, where=str(source))
            chosen = [name for name in names if columns is None or name in columns]
            table = opened.read(columns=chosen)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{source}` cannot be read as parquet: {' '.join(str(error).split())}") from error
    arrays = {name: _one_array(table.column(name)) for name in chosen}
    return TextTable(source, names, arrays, table.num_rows)


def text_column(column: pa.Array | pa.ChunkedArray, name: str, source: Path) -> pa.Array | pa.ChunkedArray:
    """A column of parquet as large_string without nulls: text, bytes that are UTF-8, and numbers as they are written.

    Raises:
        DataError: it holds lists, structs or bytes that are no text.
    """
    if pa.types.is_nested(column.type):
        raise DataError(f"column `{name}` of table `{source}` holds `{column.type}`, not text")
    try:
        return pc.fill_null(pc.cast(column, pa.large_string()), "")
    except pa.ArrowException as error:
        said = " ".join(str(error).split())
        raise DataError(f"column `{name}` of table `{source}` holds `{column.type}`, not text: {said}") from error


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def number_of(text: str) -> float:
    """A number as tables write it. Python would take `1_0` for 10, and digits of other scripts.

    Raises:
        ValueError: it is none.
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"`{shown(text)}` is not a number")
    return float(text)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    if pa.types.is_string(column.type) or str(column.type) == "string_view":
        column = pc.cast(column, pa.large_string())
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _read_csv(source: Path, columns: Collection[str] | None) -> TextTable:
    delimiter = _delimiter(source)
    line, names = next(_records(source, delimiter), (1, []))
    if not names:
        raise DataError(f"table `{source}` is empty: it has no header")
    _check_header(source, names, where=f"{source}:{line}")
    chosen = [(place, name) for place, name in enumerate(names) if columns is None or name in columns]
    parts: dict[str, list[pa.Array]] = {name: [] for _, name in chosen}
    num_rows = 0
    with _no_garbage_collection():
        for chunk in _chunks(source, delimiter, names):
            num_rows += len(chunk)
            fields = list(zip(*chunk, strict=True))
            for place, name in chosen:
                parts[name].append(pa.array(fields[place], pa.large_string()))
    arrays: dict[str, pa.Array] = {}
    for _, name in chosen:  # the parts of a column go before the next is joined: they are as large as the file
        part = parts.pop(name)
        arrays[name] = pa.concat_arrays(part) if part else pa.array([], pa.large_string())
    notes = []
    if delimiter != ",":
        named = _DELIMITER_NAMES.get(delimiter, f"`{delimiter}`")
        notes.append(f"the columns of `{source}` are separated by {named}, not by commas")
    return TextTable(source, names, arrays, num_rows, notes, delimiter)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of short-lived lists set the collector off over and over, for a third of the time, and none is garbage
    that only it would find."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _chunks(source: Path, delimiter: str, names: list[str]) -> Iterator[list[list[str]]]:
    """Rows after the header, many at a time. At the first fault the file is gone through again for its line."""
    sizes, marked = {len(names)}, _with_mark(names)
    try:
        if _holds_zero_bytes(source):
            _raise_first_fault(source, delimiter, names)
        with source.open(encoding="utf-8-sig", newline="") as file:
            records = filter(None, _reader(file, delimiter))
            next(records)
            while chunk := list(islice(records, _CHUNK)):
                if set(map(len, chunk)) != sizes or names in chunk or marked in chunk:
                    _raise_first_fault(source, delimiter, names)
                yield chunk
    except (csv.Error, UnicodeDecodeError, OSError):
        _raise_first_fault(source, delimiter, names)


def _reader(file: Iterable[str], delimiter: str) -> _CsvReader:
    csv.field_size_limit(_LONGEST_FIELD)
    return csv.reader(file, delimiter=delimiter, strict=True)


def _with_mark(names: list[str]) -> list[str]:
    """A header behind a byte order mark, as it stands in the middle of files that were put one behind the other."""
    return ["\ufeff" + names[0], *names[1:]]


def _records(source: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Records with the line on which each begins. Empty lines are passed over."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as file:
            reader = _reader(file, delimiter)
            begin = 1
            while True:
                try:
                    record = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if "NUL" in str(error):  # before Python 3.11
                        raise _zero_byte(f"{source}:{begin}") from error
                    raise DataError(
                        f"quotes do not match: {error}",
                        where=f"{source}:{begin}",
                        hint='a field that begins with a quote ends with one, its own quotes doubled: "a ""b"", c"',
                    ) from error
                if record:
                    yield begin, record
                begin = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise _not_utf8(source) from error
    except OSError as error:
        raise DataError(f"`{source}` cannot be read: {error.strerror or error}") from error


def _delimiter(source: Path) -> str:
    """The first delimiter that makes the header hold a column `path`; the comma when none does."""
    for delimiter in DELIMITERS:
        try:
            _, header = next(_records(source, delimiter), (1, []))
        except DataError:
            if delimiter == DELIMITERS[0]:
                raise
            continue
        if any(_meant(name) == "path" for name in header):
            return delimiter
    return DELIMITERS[0]


def _check_header(source: Path, names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"column names used more than once: {', '.join(f'`{name}`' for name in twice)}", where=where)
    for name in names:
        meant = _meant(name)
        if name != meant and meant in COLUMNS and meant not in names:
            raise DataError(
                f"column `{name}` is not `{meant}`, and a table has no other one of that name",
                where=where,
                hint=f"write `{meant}`: names of columns have no spaces around them and no capital letters",
            )


def _meant(name: str) -> str:
    """The column that a name stands for but for spaces around it, and for `path` and `text` in any case of letters."""
    bare = name.strip()
    return bare.lower() if bare.lower() in ("path", "text") else bare


def _holds_zero_bytes(source: Path) -> bool:
    with source.open("rb") as file:
        return any(b"\0" in block for block in iter(lambda: file.read(1 << 20), b""))


def _raise_first_fault(source: Path, delimiter: str, names: list[str]) -> NoReturn:
    expected = len(names)
    records = _records(source, delimiter)
    next(records)
    for line, record in records:
        where = f"{source}:{line}"
        if len(record) != expected:
            more = len(record) > expected and delimiter == ","
            raise DataError(
                f"the row has {len(record)} fields, the header {expected}",
                where=where,
                hint="fields with commas in them stand in quotes" if more else "every row is as long as the header",
            )
        if record in (names, _with_mark(names)):
            raise DataError("the header stands again among the rows", where=where, hint="remove the line")
        if any("\0" in cell for cell in record):
            raise _zero_byte(where)
    raise DataError(f"table `{source}` changed while it was read")


def _zero_byte(where: str) -> DataError:
    return DataError(
        "the row holds a zero byte",
        where=where,
        hint="a table is text in UTF-8; UTF-16 and binary files hold zero bytes",
    )


def _not_utf8(source: Path) -> DataError:
    data = source.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return DataError(f"table `{source}` is UTF-16, not UTF-8", hint="save it as CSV in UTF-8")
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, at) + 1
        column = at - (data.rfind(b"\n", 0, at) + 1) + 1
        return DataError(
            f"table `{source}` is not UTF-8: byte 0x{data[at]:02x} at byte {column} of line {line}",
            where=f"{source}:{line}",
            hint=f"if it came from Windows: iconv -f cp1252 -t utf-8 {source.name} > utf8.csv",
        )
    return DataError(f"table `{source}` changed while it was read")
