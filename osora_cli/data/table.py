"""The table of clips that training and reconstruction read, held in arrow and numpy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from osora_cli.data.media_types import is_still
from osora_cli.data.presence import Presence
from osora_cli.data.stored_text import LARGE_GROUP, TEXT_COLUMNS, StoredColumn, StoredText, find_stored_text
from osora_cli.data.text_table import COLUMNS as COLUMNS
from osora_cli.data.text_table import PARQUET, TextTable, number_of, read_text_table, shown, text_column
from osora_cli.errors import DataError
from osora_cli.words import counted

SCORE_COLUMN = "score_vmafmotion"
_WHOLE = ("num_frames", "height", "width")
_SHOWN = 5
# What a number that is not there looks like in other people's tables.
_EMPTY = ("", "nan", "none", "null", "na", "n/a", "<na>")
# Strings that are gone through one by one are taken out of arrow so many at a time.
_CHUNK = 1 << 16

Strings: TypeAlias = "pa.Array | StoredColumn"


@dataclass(frozen=True)
class ClipTable:
    """One row a clip or still.

    Attributes:
        source: the file.
        path, text: large_string arrays, never null; `text` may be empty. With `memory_efficient` they stay on disk.
        num_frames, height, width: `[rows]` int64, at least 1; size in pixels as displayed.
        aspect_ratio: `[rows]` float64, height / width.
        resolution: `[rows]` float64, height * width, pixels.
        fps: `[rows]` float64, NaN for stills.
        score_vmafmotion: `[rows]` float64 with NaN where unknown, or None when the table has no such column.
        root: where relative paths are tried last.
        notes: what a reader should know about how the table was taken.
        digest: xxh3_128 of the contents, in hex; the same for a CSV and a parquet file of the same rows.
    """

    source: Path
    path: Strings
    text: Strings
    num_frames: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    aspect_ratio: NDArray[np.float64]
    resolution: NDArray[np.float64]
    fps: NDArray[np.float64]
    score_vmafmotion: NDArray[np.float64] | None
    root: Path | None
    notes: tuple[str, ...]
    digest: str

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        *,
        memory_efficient: bool = False,
    ) -> ClipTable:
        """Reads a CSV or parquet table and checks every value that is used.

        Args:
            path: the table.
            root: where relative clip paths are tried last.
            memory_efficient: leave paths and captions on disk, and read the row groups that are needed when they are.

        Raises:
            DataError: the table is missing, unreadable or ragged, lacks columns (all named at once), has no rows, or
                holds values that cannot be (the first few named with row and column, and their number); or it is
                no parquet table and `memory_efficient` is wanted.
        """
        wanted: tuple[str, ...] = (*COLUMNS, SCORE_COLUMN)
        stored: StoredText | None = None
        if memory_efficient:
            _check_parquet(Path(path))
            wanted = tuple(name for name in wanted if name not in TEXT_COLUMNS)
        raw = read_text_table(path, wanted)
        if memory_efficient:
            stored = find_stored_text(raw.source, raw.num_rows)
        _check_columns(raw, () if stored is None else TEXT_COLUMNS)
        if raw.num_rows == 0:
            raise DataError(f"table `{raw.source}` has a header and no rows")
        if stored is not None:
            raw.notes.append(_about(stored))
        numbers = _Numbers(raw)
        text = {name: _text(raw, name) if stored is None else stored.column(name) for name in TEXT_COLUMNS}
        _check_paths(raw, text["path"])
        whole = {name: numbers.whole(name) for name in _WHOLE}
        ratio, resolution = numbers.positive("aspect_ratio"), numbers.positive("resolution")
        fps = numbers.rate(text["path"])
        numbers.raise_if_any()
        score = numbers.read(SCORE_COLUMN) if SCORE_COLUMN in raw.columns else None
        notes = [*raw.notes, *_contradictions(whole, ratio, resolution)]
        used = {**text, **whole, "fps": fps, **({} if score is None else {SCORE_COLUMN: score})}
        return cls(
            source=raw.source,
            path=text["path"],
            text=text["text"],
            num_frames=whole["num_frames"],
            height=whole["height"],
            width=whole["width"],
            aspect_ratio=ratio,
            resolution=resolution,
            fps=fps,
            score_vmafmotion=score,
            root=None if root is None else Path(root),
            notes=tuple(notes),
            digest=_digest(used),
        )

    def __len__(self) -> int:
        return len(self.num_frames)

    def path_of(self, row: int) -> str:
        """The path as written in the table."""
        return str(self.path[row].as_py())

    def paths_of(self, rows: Sequence[int]) -> list[str]:
        """The paths of many rows as written in the table."""
        if isinstance(self.path, StoredColumn):
            return [self.path_of(row) for row in rows]
        paths: list[str] = self.path.take(pa.array(rows, pa.int64())).to_pylist()
        return paths

    def text_of(self, row: int) -> str:
        """The caption as written in the table."""
        return str(self.text[row].as_py())

    def tried(self, row: int) -> list[Path]:
        """Where the file of a row is looked for, in this order."""
        return candidates(self.path_of(row), self.source, self.root)

    def resolve(self, row: int) -> Path:
        """The file of a row: as written from the working directory, from the table's folder, from the root.

        Raises:
            DataError: it is in none of these places, which are listed.
        """
        tried = self.tried(row)
        for place in tried:
            if place.exists():
                return place
        raise DataError(
            f"file `{self.path_of(row)}` of row {row} does not exist",
            where=str(self.source),
            hint="tried " + ", ".join(f"`{place}`" for place in tried),
        )

    def missing_files(self) -> list[int]:
        """Rows whose file is in none of the places where it is looked for, in order."""
        folders = ["", os.fspath(self.source.parent), *([] if self.root is None else [os.fspath(self.root)])]
        exists, join = Presence().exists, os.path.join
        missing: list[int] = []
        for first, paths in _numbered(self.path):
            missing += [
                row
                for row, path in enumerate(paths, first)
                if not any(exists(join(folder, path)) for folder in folders)
            ]
        return missing

    def missing_files_error(self, rows: Sequence[int]) -> DataError:
        """What to say about rows that `missing_files` found."""
        named = ", ".join(f"`{self.path_of(row)}` (row {row})" for row in rows[:_SHOWN])
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        tried = ", ".join(f"`{place}`" for place in self.tried(rows[0]))
        return DataError(
            f"{len(rows)} of {len(self)} files of the table do not exist: {named}{more}",
            where=str(self.source),
            hint=f"relative paths are tried from the working directory, the table's folder and the root: {tried}",
        )


def candidates(path: str, source: Path, root: Path | None) -> list[Path]:
    """Where a path written in table `source` may be: from the working directory, the table's folder, the root."""
    places = [Path(path), source.parent / path, *([] if root is None else [root / path])]
    return list(dict.fromkeys(places))


def _check_parquet(source: Path) -> None:
    if source.exists() and source.suffix.lower() not in PARQUET:
        raise DataError(
            f"table `{source}` is no parquet file, and `memory_efficient` reads parts of one",
            hint=f"osora data meta --input {source} --output {source.with_suffix('.parquet')}",
        )


def _about(stored: StoredText) -> str:
    groups, largest = len(stored.starts) - 1, stored.largest_group
    where = f"in {len(stored.files)} files" if len(stored.files) > 1 else f"in {groups} row groups"
    text = f"paths and captions stay on disk, {where} of up to {largest} rows"
    if largest > LARGE_GROUP:
        text += ": each clip costs the reading of so many; `osora data meta` writes a table in smaller groups"
    return text


def _chunks(column: Strings) -> Iterator[pa.Array]:
    """A column in parts that fit into memory."""
    if isinstance(column, StoredColumn):
        yield from column.chunks()
        return
    for first in range(0, len(column), _CHUNK):
        yield column.slice(first, _CHUNK)


def _numbered(column: Strings) -> Iterator[tuple[int, list[str]]]:
    """Parts of a column as Python's strings, each with the row it begins at."""
    first = 0
    for chunk in _chunks(column):
        yield first, chunk.to_pylist()
        first += len(chunk)


def _check_paths(raw: TextTable, column: Strings) -> None:
    count, first_row, seen = 0, 0, 0
    for chunk in _chunks(column):
        empty = np.flatnonzero(pc.equal(chunk, "").to_numpy(zero_copy_only=False))
        if empty.size and not count:
            first_row = seen + int(empty[0])
        count += empty.size
        seen += len(chunk)
    if count:
        raise DataError(f"{counted(count, 'row has', 'rows have')} an empty `path`", where=raw.where(first_row))


def _check_columns(raw: TextTable, elsewhere: Sequence[str] = ()) -> None:
    missing = [name for name in COLUMNS if name not in raw.names and name not in elsewhere]
    if not missing:
        return
    found = ", ".join(f"`{name}`" for name in raw.names)
    if "path" in missing:
        hint = "a table begins with a header line that names the column `path`"
    else:
        output = raw.source.with_name(raw.source.stem + "_meta" + raw.source.suffix)
        hint = f"osora data meta --input {raw.source} --output {output}"
    raise DataError(
        f"table `{raw.source}` lacks columns: {', '.join(f'`{name}`' for name in missing)} (it has: {found})", hint=hint
    )


def _text(raw: TextTable, name: str) -> pa.Array:
    return text_column(raw.columns.pop(name), name, raw.source)


class _Numbers:
    """Reads number columns, and collects what is wrong with them for one error."""

    def __init__(self, raw: TextTable) -> None:
        self._raw = raw
        self._faults: list[tuple[int, str, str]] = []

    def read(self, name: str) -> NDArray[np.float64]:
        """Float64 with NaN where nothing is; what is not a number is a fault."""
        column = self._raw.columns.pop(name)  # not needed again, and large
        if not pa.types.is_large_string(column.type):
            return self._of_numbers(name, column)
        trimmed = pc.utf8_trim_whitespace(pc.fill_null(column, ""))
        empty = pc.is_in(pc.utf8_lower(trimmed), pa.array(_EMPTY, pa.large_string()))
        filled = pc.if_else(empty, "nan", trimmed)
        try:
            return np.asarray(pc.cast(filled, pa.float64()), dtype=np.float64)
        except pa.ArrowInvalid:
            return np.asarray([self._one(name, row, text) for row, text in enumerate(filled.to_pylist())])

    def _of_numbers(self, name: str, column: pa.Array) -> NDArray[np.float64]:
        """A column of parquet that holds no text."""
        try:
            # Not safe: whole numbers that float64 cannot hold are far above all that are allowed.
            values = pc.cast(column, pa.float64(), safe=False)
        except pa.ArrowException as error:
            raise DataError(
                f"column `{name}` of table `{self._raw.source}` holds `{column.type}`, not numbers"
            ) from error
        return np.asarray(pc.fill_null(values, np.nan), dtype=np.float64)

    def _one(self, name: str, row: int, text: str) -> float:
        try:
            return number_of(text)
        except ValueError:
            self._faults.append((row, name, f"`{shown(text)}` is not a number"))
            return 1.0

    def whole(self, name: str) -> NDArray[np.int64]:
        values = self.read(name)
        good = np.isfinite(values) & (values >= 1) & (values < 2**53)
        good &= np.where(good, values, 0) == np.floor(np.where(good, values, 0))
        self._note(name, values, good, "is not a whole number of at least 1")
        return np.where(good, values, 1).astype(np.int64)

    def positive(self, name: str) -> NDArray[np.float64]:
        values = self.read(name)
        self._note(name, values, np.isfinite(values) & (values > 0), "is not a number above 0")
        return values

    def rate(self, paths: Strings) -> NDArray[np.float64]:
        """Frames per second: above 0, or nothing for a still."""
        values = self.read("fps")
        good = np.isfinite(values) & (values > 0)
        without = np.isnan(values)
        for first, chunk in _numbered(paths) if without.any() else ():
            for place in np.flatnonzero(without[first : first + len(chunk)]):
                good[first + place] = is_still(chunk[place])
        self._note("fps", values, good, "is not a number above 0")
        return values

    def _note(self, name: str, values: NDArray[np.float64], good: NDArray[np.bool_], why: str) -> None:
        for row in np.flatnonzero(~good):
            value = values[row]
            self._faults.append((int(row), name, "is empty" if np.isnan(value) else f"`{value:g}` {why}"))

    def raise_if_any(self) -> None:
        if not self._faults:
            return
        faults, source = sorted(self._faults), self._raw.source
        output = source.with_name(f"{source.stem}_meta{source.suffix}")
        lines = [f"row {row}, column `{name}`: {what}" for row, name, what in faults[:_SHOWN]]
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DataError(
            f"{len(faults)} values of table `{source}` cannot be used: {'; '.join(lines)}{more}",
            where=self._raw.where(faults[0][0]),
            hint=f"osora data meta --input {source} --output {output} --on-error skip",
        )


def _contradictions(
    whole: dict[str, NDArray[np.int64]], ratio: NDArray[np.float64], resolution: NDArray[np.float64]
) -> list[str]:
    """Columns that disagree with height and width. These two count; the others are not used."""
    height, width = whole["height"], whole["width"]
    notes = []
    for name, given, right in (("aspect_ratio", ratio, height / width), ("resolution", resolution, height * width)):
        wrong = int((np.abs(given - right) > 0.01 * right).sum())
        if wrong:
            rule = "height / width" if name == "aspect_ratio" else "height * width"
            notes.append(f"`{name}` is not {rule} in {wrong} of {len(height)} rows; height and width are used")
    return notes


def _digest(columns: dict[str, Strings | NDArray[np.int64] | NDArray[np.float64]]) -> str:
    """xxh3_128 over names, lengths and values, whatever the file's format."""
    hashed = xxhash.xxh3_128()
    for name, column in columns.items():
        hashed.update(f"{name}:{len(column)};".encode())
        if isinstance(column, np.ndarray):
            values = np.where(np.isnan(column), np.nan, column) if column.dtype.kind == "f" else column
            hashed.update(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
        else:
            _update(hashed, (_lengths(chunk) for chunk in _chunks(column)))
            _update(hashed, (_joined(chunk) for chunk in _chunks(column)))
    return hashed.hexdigest()


def _update(hashed: xxhash.xxh3_128, parts: Iterable[memoryview | bytes]) -> None:
    for part in parts:
        hashed.update(part)


def _lengths(column: pa.Array) -> bytes:
    """Bytes of each string, as little-endian int64."""
    lengths: bytes = pc.binary_length(column).to_numpy(zero_copy_only=False).astype("<i8").tobytes()
    return lengths


def _joined(column: pa.Array) -> memoryview | bytes:
    """The bytes of all strings, one after the other."""
    _, offsets, data = column.buffers()
    if data is None:
        return b""
    places = np.frombuffer(offsets, dtype=np.int64)
    begin, end = int(places[column.offset]), int(places[column.offset + len(column)])
    return memoryview(data)[begin:end]
