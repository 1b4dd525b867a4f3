"""Columns of other tables, joined by path: scores, captions, whatever was written about the same clips elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from osora_cli.data.meta import FILLED, MetaTable, column_texts, measured_texts, raw_texts
from osora_cli.data.text_table import TextTable, read_text_table, shown, text_column
from osora_cli.errors import DataError
from osora_cli.words import counted


def merge_table(table: MetaTable, source: Path) -> None:
    """Joins the columns of `source` to those of `table`, by path.

    A path matches as it is written, else by the file that it means from the other table's folder or the working
    directory. A column that the table has is filled where it is empty, and never doubled; where both have a value the
    table's is kept, and their number noted. Rows without a match get nothing, and none is dropped.

    Raises:
        DataError: `source` is missing or unreadable, has no column `path`, says two things of one path, or matches no
            row at all.
    """
    other = read_text_table(source)
    if "path" not in other.names:
        found = ", ".join(f"`{name}`" for name in other.names)
        raise DataError(f"table `{source}` has no column `path` to be merged by (it has: {found})")
    paths = raw_texts(other, "path")
    taken = _match(table, other, _unique(other, paths), paths)
    _fill(table, other, taken)


def _unique(other: TextTable, paths: Sequence[str]) -> dict[str, int]:
    """The row of each path; of rows that are the same all over, the first."""
    rows: dict[str, int] = {}
    for row, path in enumerate(paths):
        first = rows.setdefault(path, row)
        if first != row:
            _refuse_two(other, first, row, f"path `{path}` stands")
    return rows


def _refuse_two(other: TextTable, first: int, row: int, what: str) -> None:
    """Ends where two rows about the same clip say different things."""
    for name, column in other.columns.items():
        one, two = column[first].as_py(), column[row].as_py()
        if name != "path" and one != two and not (one != one and two != two):  # NaN is not itself
            raise DataError(
                f"{what} in rows {first} and {row}, with `{name}` `{shown(one)}` and `{shown(two)}`",
                where=other.where(row),
                hint="remove one of the two rows",
            )


def _match(table: MetaTable, other: TextTable, rows: dict[str, int], paths: Sequence[str]) -> list[int | None]:
    """For each row of the table the row of `other`; notes how many have none."""
    by_file: dict[str, list[int]] = {}
    for folder in (os.fspath(other.source.parent), ""):
        for path, row in rows.items():
            by_file.setdefault(os.path.abspath(os.path.join(folder, path)), []).append(row)
    taken: list[int | None] = []
    for written, file in zip(table.written, table.files, strict=True):
        found = rows.get(written)
        if found is None and file in by_file:
            found = by_file[file][0]
            for again in by_file[file][1:]:
                _refuse_two(other, found, again, f"file `{file}` stands")
        taken.append(found)
    matched = len(taken) - taken.count(None)
    if not matched:
        raise DataError(
            f"no path of table `{other.source}` is one of the {len(table)} clips",
            where=f"`{paths[0]}` there, `{table.written[0]}` here" if paths else str(other.source),
            hint="paths are compared as written, then as files: from that table's folder and the working directory",
        )
    used = {row for row in taken if row is not None}
    unused = [path for path, row in rows.items() if row not in used]
    note = f"`{other.source}` is merged into {matched} of {len(table)} rows"
    if unused:
        note += f"; {len(unused)} of its paths are no clip of the table (first: `{unused[0]}`)"
    table.notes.append(note)
    return taken


def _fill(table: MetaTable, other: TextTable, taken: Sequence[int | None]) -> None:
    indices = pa.array(taken, pa.int64())
    for name, column in other.columns.items():
        if name == "path":
            continue
        given = column.take(indices)
        if name == "text":
            table.text = _filled(table, name, table.text, text_column(given, name, other.source).to_pylist())
        elif name in FILLED:
            table.values[name] = _filled(table, name, table.values[name], measured_texts(name, given))
        elif name not in table.others:
            table.names.append(name)
            table.others[name] = given
        else:
            table.others[name] = _joined(table, name, table.others[name], given)


def _filled(table: MetaTable, name: str, own: Sequence[str], given: Sequence[str]) -> list[str]:
    """`own`, and `given` where that is empty."""
    _note_other_values(table, name, sum(bool(a and b) and a != b for a, b in zip(own, given, strict=True)))
    return [a or b for a, b in zip(own, given, strict=True)]


def _joined(table: MetaTable, name: str, own: pa.Array, given: pa.Array) -> pa.Array:
    """As `_filled`, for a column that keeps its type where both have the same."""
    texts, others = column_texts(own), column_texts(given)
    filled = _filled(table, name, texts, others)
    if own.type != given.type:
        return pa.array(filled, pa.large_string())
    empty = pa.array(np.array([not text for text in texts], dtype=np.bool_))
    return pc.if_else(empty, given, own)


def _note_other_values(table: MetaTable, name: str, count: int) -> None:
    if count:
        table.notes.append(
            f"`{name}` of {counted(count, 'row')} has another value in the merged table; the table's own is kept"
        )
