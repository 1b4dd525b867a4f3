"""The table that `osora data meta` fills: what is there is kept, what is missing is filled, rows keep their order."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from osora_cli.data.media_types import STILL_EXTENSIONS, VIDEO_EXTENSIONS, is_still
from osora_cli.data.prober import Facts
from osora_cli.data.text_table import COLUMNS, TextTable, number_of, read_text_table, shown, text_column
from osora_cli.errors import DataError
from osora_cli.words import counted

FILLED = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps")
_WHOLE = frozenset({"num_frames", "height", "width", "resolution"})
_ENDINGS_SHOWN = 8
# What others call the column of captions.
_CAPTION_NAMES = frozenset({"caption", "captions", "prompt", "prompts", "description", "title", "txt"})
# Of whole numbers that float64 holds, up to 2**53, whatever their digits are.
_MOST_DIGITS = 16


@dataclass
class MetaTable:
    """A table on its way to the eight columns.

    Attributes:
        names: columns of the output, in order: those of the input, then those of the eight that it lacked.
        path, text: by row.
        values: of the six columns, by row, as they will be written; empty where there is nothing.
        others: columns of the input that are not of the eight, untouched.
        written: the paths as they stand in the input, by row; those in `path` may be rewritten for the output's place.
        files: where each row's file is, or None.
        notes: what a reader should know.
    """

    names: list[str]
    path: list[str]
    text: list[str]
    values: dict[str, list[str]]
    others: dict[str, pa.Array] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    files: list[str | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.path)

    def to_probe(self, *, exact: bool) -> list[int]:
        """Rows whose file has to be looked at: all with `exact`, else those that lack what only the file tells."""
        return [row for row in range(len(self)) if self.files[row] is not None and (exact or self._lacks(row))]

    def _lacks(self, row: int) -> bool:
        values = self.values
        if not (values["num_frames"][row] and values["height"][row] and values["width"][row]):
            return True
        return not values["fps"][row] and not is_still(self.path[row])

    def fill(self, row: int, facts: Facts | None, *, overwrite: bool) -> None:
        """Fills a row from its file's facts (None: they were not needed) and from what follows from them."""
        if facts is not None:
            fps = "" if facts.fps is None else repr(float(facts.fps))
            found = {"num_frames": facts.num_frames, "height": facts.height, "width": facts.width, "fps": fps}
            for name, value in found.items():
                if overwrite or not self.values[name][row]:
                    self.values[name][row] = str(value)
        height, width = int(self.values["height"][row]), int(self.values["width"][row])
        for name, derived in (("aspect_ratio", repr(height / width)), ("resolution", str(height * width))):
            if overwrite or not self.values[name][row]:
                self.values[name][row] = derived

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        self.path = [self.path[row] for row in rows]
        self.text = [self.text[row] for row in rows]
        self.written = [self.written[row] for row in rows]
        self.files = [self.files[row] for row in rows]
        self.values = {name: [column[row] for row in rows] for name, column in self.values.items()}
        chosen = pa.array(rows, pa.int64())
        self.others = {name: column.take(chosen) for name, column in self.others.items()}

    def as_text(self, name: str) -> list[str]:
        """A column as it is written to a CSV."""
        if name in ("path", "text"):
            return self.path if name == "path" else self.text
        return self.values[name] if name in self.values else column_texts(self.others[name])

    def as_array(self, name: str) -> pa.Array:
        """A column as it is written to parquet: numbers as numbers, NaN for the rate of a still."""
        if name in ("path", "text"):
            return pa.array(self.path if name == "path" else self.text, pa.string())
        if name not in self.values:
            return self.others[name]
        column = self.values[name]
        if name in _WHOLE:
            return pa.array([int(value) if value else None for value in column], pa.int64())
        return pa.array([float(value) if value else math.nan for value in column], pa.float64())


def load_meta_table(source: Path, output: Path, root: Path | None) -> MetaTable:
    """Reads a table, or lists a folder, and finds every row's file.

    Raises:
        DataError: no such table or folder, unreadable, no column `path`, no rows.
    """
    if source.is_dir():
        return _from_folder(source, output)
    raw = read_text_table(source)
    if "path" not in raw.names:
        found = ", ".join(f"`{name}`" for name in raw.names)
        raise DataError(
            f"table `{source}` has no column `path` (it has: {found})",
            hint="a table begins with a header line that names at least the column `path`",
        )
    if raw.num_rows == 0:
        raise DataError(f"table `{source}` has a header and no rows")
    table = MetaTable(
        names=[*raw.names, *(name for name in COLUMNS if name not in raw.names)],
        path=raw_texts(raw, "path"),
        text=raw_texts(raw, "text") if "text" in raw.names else [""] * raw.num_rows,
        values={name: _numbers(raw, name) for name in FILLED},
        others={name: column for name, column in raw.columns.items() if name not in COLUMNS},
        notes=list(raw.notes),
    )
    empty = next((row for row, path in enumerate(table.path) if not path), None)
    if empty is not None:
        raise DataError(
            f"{counted(table.path.count(''), 'row has', 'rows have')} an empty `path`", where=raw.where(empty)
        )
    if "text" not in raw.names:
        table.notes.append(f"table `{source}` has no column `text`: captions are left empty{_captions(raw.names)}")
    _count_replaced(raw, table)
    _locate(table, source, output, root)
    return table


def _from_folder(folder: Path, output: Path) -> MetaTable:
    """Every video and still below a folder, hidden ones left out, in the order of their names."""
    files: list[Path] = []
    others: Counter[str] = Counter()
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        others["linked folder"] += sum(os.path.islink(os.path.join(place, name)) for name in folders)
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            ending = path.suffix.lower()
            if ending in STILL_EXTENSIONS | VIDEO_EXTENSIONS:
                files.append(path)
            else:
                others[ending or "no ending"] += 1
    if not files:
        kinds = " ".join(sorted(STILL_EXTENSIONS | VIDEO_EXTENSIONS))
        raise DataError(f"no video and no still in folder `{folder}`", allowed=kinds)
    files.sort(key=lambda path: path.relative_to(folder).parts)
    found = [os.path.abspath(path) for path in files]
    return MetaTable(
        names=list(COLUMNS),
        path=[path_for(path, output) for path in found],
        text=[""] * len(found),
        values={name: [""] * len(found) for name in FILLED},
        written=[path_for(path, output) for path in found],
        files=list(found),
        notes=_passed_over(others),
    )


def _captions(names: Sequence[str]) -> str:
    """A hint at a column that may hold what is missing."""
    found = [f"`{name}`" for name in names if name.strip().lower() in _CAPTION_NAMES]
    return f"; should it be {' or '.join(found)}, rename that to `text`" if found else ""


def _refuse_folder(error: OSError) -> None:
    """A folder that cannot be listed: what is in it would be left out without a word."""
    raise DataError(f"folder `{error.filename}` cannot be listed: {error.strerror}") from error


def _passed_over(others: Counter[str]) -> list[str]:
    """What in a folder is no clip by its name, counted by ending."""
    counts = [f"{ending}: {count}" for ending, count in others.most_common() if count]
    if not counts:
        return []
    more = f", and {len(counts) - _ENDINGS_SHOWN} more endings" if len(counts) > _ENDINGS_SHOWN else ""
    total = sum(others.values())
    return [f"{total} of the folder's entries are passed over ({', '.join(counts[:_ENDINGS_SHOWN])}{more})"]


def path_for(file: str, output: Path) -> str:
    """How a file is written so that it is found from the output's place: relative below its folder, else absolute."""
    folder = os.path.abspath(output.parent)
    return os.path.relpath(file, folder) if os.path.commonpath([file, folder]) == folder else file


def _locate(table: MetaTable, source: Path, output: Path, root: Path | None) -> None:
    """Finds the files. A path that only the input's folder makes good is rewritten for the output's place."""
    elsewhere = source.parent.resolve() != output.parent.resolve()
    folder = os.fspath(source.parent)
    folders = ["", folder, *([] if root is None else [os.fspath(root)])]
    rewritten = 0
    table.written = list(table.path)
    for row, path in enumerate(table.path):
        place = next((top for top in folders if os.path.lexists(os.path.join(top, path))), None)
        table.files.append(None if place is None else os.path.abspath(os.path.join(place, path)))
        if elsewhere and place == folder and not os.path.isabs(path):
            table.path[row] = path_for(os.path.abspath(os.path.join(place, path)), output)
            rewritten += 1
    if rewritten:
        table.notes.append(
            f"{rewritten} paths relative to `{source.parent}` are rewritten to be found from `{output.parent}`"
        )


def raw_texts(raw: TextTable, name: str) -> list[str]:
    """`path` or `text` of a table.

    Raises:
        DataError: the column is of parquet and holds what is no text.
    """
    texts: list[str] = text_column(raw.columns[name], name, raw.source).to_pylist()
    return texts


def column_texts(column: pa.Array) -> list[str]:
    """A column as text: null is empty, text is as it is, numbers as Python writes them."""
    if pa.types.is_large_string(column.type) or pa.types.is_string(column.type):
        return [str(value) for value in pc.fill_null(column, "").to_pylist()]
    return ["" if _is_nothing(value) else str(value) for value in column.to_pylist()]


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbers(raw: TextTable, name: str) -> list[str]:
    """One of the six columns; what is not a number that could be there is emptied, to be filled."""
    return measured_texts(name, raw.columns[name]) if name in raw.columns else [""] * raw.num_rows


def measured_texts(name: str, column: pa.Array) -> list[str]:
    """One of the six columns as text; what is not a number that could be there is empty."""
    clean = _whole if name in _WHOLE else _positive
    return [clean(text.strip()) for text in column_texts(column)]


def _whole(text: str) -> str:
    if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS:
        return text.lstrip("0")
    number = _float(text)
    return str(int(number)) if 1 <= number < 2**53 and number == math.floor(number) else ""


def _positive(text: str) -> str:
    return text if _float(text) > 0 else ""


def _float(text: str) -> float:
    try:
        number = number_of(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _count_replaced(raw: TextTable, table: MetaTable) -> None:
    """Says how many values were written in the input and could not be meant."""
    for name in FILLED:
        if name not in raw.columns:
            continue
        before = column_texts(raw.columns[name])
        rows = [
            row
            for row, (old, new) in enumerate(zip(before, table.values[name], strict=True))
            if not new and old.strip().lower() not in ("", "nan", "none", "null", "na", "n/a", "<na>")
        ]
        if rows:
            table.notes.append(
                f"`{name}` of {len(rows)} rows is no number that can be, and is filled anew "
                f"(first: `{shown(before[rows[0]])}`, row {rows[0]})"
            )


def settle(
    table: MetaTable, found: Mapping[str, Facts], probed: Collection[int], *, exact: bool
) -> list[tuple[int, str]]:
    """Fills every row that can be, and returns (row, reason) for the others, in order."""
    looked_at = set(probed)
    bad: list[tuple[int, str]] = []
    for row in range(len(table)):
        reason = _row_fault(table, row)
        facts = found[table.files[row] or ""] if reason is None and row in looked_at else None
        if facts is not None and facts.reason is not None:
            reason = facts.reason
        if reason is not None:
            bad.append((row, reason))
        else:
            table.fill(row, facts, overwrite=exact)
    return bad


def _row_fault(table: MetaTable, row: int) -> str | None:
    if table.files[row] is None:
        return "no such file"
    try:
        table.path[row].encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not UTF-8, and a table cannot hold it"
    return None
