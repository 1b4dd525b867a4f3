"""Paths and captions of a big table that stay on disk: row groups of parquet, read when a row of theirs is asked for.

They lie in the table's own file, or in a folder of its name beside it that holds many small files, as Open-Sora's tool
for `memory_efficient` writes it: `TABLE/00001.parquet`, `TABLE/00002.parquet`, ... with the same number of rows each
but for the last.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from osora_cli.data.text_table import text_column
from osora_cli.errors import DataError

TEXT_COLUMNS = ("path", "text")
# A clip costs the reading of one group: above this that is felt beside its decoding.
LARGE_GROUP = 50_000
_CACHED_BYTES = 32 << 20
_OPEN_FILES = 16


@dataclass
class StoredText:
    """The columns `path` and `text` of a table, on disk. Can be pickled: who gets it opens the files anew.

    Attributes:
        files: where the rows lie, in order.
        starts: row that each group begins with, and behind them the number of rows, [groups + 1].
        file_of, group_of: file and row group of each group, [groups]; a group of -1 is the whole file.
    """

    files: list[str]
    starts: NDArray[np.int64]
    file_of: NDArray[np.int32]
    group_of: NDArray[np.int32]
    _cache: OrderedDict[int, pa.Table] = field(default_factory=OrderedDict, repr=False)
    _open: OrderedDict[int, pq.ParquetFile] = field(default_factory=OrderedDict, repr=False)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def largest_group(self) -> int:
        """Rows of the largest group: what is read for one row."""
        return int(np.diff(self.starts).max(initial=0))

    def read(self, row: int) -> tuple[str, str]:
        """Path and caption of a row.

        Raises:
            DataError: its file is missing, is not parquet, or no longer holds the rows it held.
        """
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        group = self._group(number)
        place = row - int(self.starts[number])
        return str(group.column(0)[place].as_py()), str(group.column(1)[place].as_py())

    def column(self, name: str) -> StoredColumn:
        """`path` or `text`, to be gone through or asked for single rows."""
        return StoredColumn(self, TEXT_COLUMNS.index(name))

    def _group(self, number: int) -> pa.Table:
        """A group; those asked for last are kept, up to some megabytes."""
        group = self._cache.get(number)
        if group is None:
            group = self._cache[number] = self._load(number)
            while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > _CACHED_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(number)
        return group

    def _load(self, number: int) -> pa.Table:
        file, index = int(self.file_of[number]), int(self.group_of[number])
        columns = list(TEXT_COLUMNS)
        try:
            opened = self._opened(file)
            group = opened.read(columns=columns) if index < 0 else opened.read_row_group(index, columns=columns)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise _unreadable(self.files[file], error) from error
        expected = int(self.starts[number + 1] - self.starts[number])
        if group.num_rows != expected or group.num_columns != len(columns):
            raise DataError(
                f"`{self.files[file]}` holds {group.num_rows} rows of {', '.join(map(str, group.column_names))}; "
                f"{expected} rows of {', '.join(columns)} are expected",
                hint="every file of the folder but the last holds as many rows as the first",
            )
        source = Path(self.files[file])
        return pa.table({name: _plain(group.column(name), name, source) for name in columns})

    def _opened(self, file: int) -> pq.ParquetFile:
        found = self._open.get(file)
        if found is None:
            found = self._open[file] = pq.ParquetFile(self.files[file], memory_map=False)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(file)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict(), "_open": OrderedDict()}


@dataclass(frozen=True)
class StoredColumn:
    """One column of a `StoredText`, with as much of an arrow array's manner as a table needs."""

    store: StoredText
    place: int

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> pa.Scalar:
        return pa.scalar(self.store.read(row)[self.place], pa.large_string())

    def to_pylist(self) -> list[str]:
        """All of it in memory."""
        return [text for chunk in self.chunks() for text in chunk.to_pylist()]

    def chunks(self) -> Iterator[pa.Array]:
        """The whole column, a group at a time; nothing of it is kept."""
        for number in range(len(self.store.starts) - 1):
            yield self.store._load(number).column(self.place).chunk(0)


def find_stored_text(source: Path, num_rows: int) -> StoredText | None:
    """Where paths and captions of the parquet table `source` lie on disk; None: nowhere both of them.

    Its own row groups are taken, unless it lacks a column or its groups are so large that the small files of the
    folder serve better.

    Raises:
        DataError: the folder's files do not make up the table.
    """
    own = _of_table(source)
    if own is not None and own.largest_group <= LARGE_GROUP:
        return own
    return _of_folder(source.with_suffix(""), num_rows) or own


def _of_table(source: Path) -> StoredText | None:
    try:
        with pq.ParquetFile(source) as opened:
            if not set(TEXT_COLUMNS) <= set(opened.schema_arrow.names):
                return None
            meta = opened.metadata
            sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(os.fspath(source), error) from error
    return StoredText(
        [os.path.abspath(source)],
        _starts(sizes),
        np.zeros(len(sizes), dtype=np.int32),
        np.arange(len(sizes), dtype=np.int32),
    )


def _of_folder(folder: Path, num_rows: int) -> StoredText | None:
    """The small files. Only the first is looked into: opening ten thousand would take long on a network disk."""
    if not folder.is_dir():
        return None
    files = sorted(os.path.abspath(file) for file in folder.iterdir() if file.suffix.lower() == ".parquet")
    if not files:
        return None
    try:
        with pq.ParquetFile(files[0]) as first:
            size, names = first.metadata.num_rows, set(first.schema_arrow.names)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(files[0], error) from error
    missing = [f"`{name}`" for name in TEXT_COLUMNS if name not in names]
    if missing:
        raise DataError(f"`{files[0]}` lacks columns: {', '.join(missing)}")
    if size == 0 or -(-num_rows // size) != len(files):
        raise DataError(
            f"folder `{folder}` has {len(files)} files of {size} rows, and its table has {num_rows} rows",
            hint="make the folder anew from the table, or remove it: row groups of the table itself serve as well",
        )
    starts = np.minimum(np.arange(len(files) + 1, dtype=np.int64) * size, num_rows)
    count = len(files)
    return StoredText(files, starts, np.arange(count, dtype=np.int32), np.full(count, -1, dtype=np.int32))


def _starts(sizes: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _plain(column: pa.ChunkedArray, name: str, source: Path) -> pa.Array:
    """As one array of large_string without nulls."""
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    column = text_column(column, name, source)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.large_string())


def _unreadable(file: str, error: BaseException) -> DataError:
    return DataError(f"`{file}` cannot be read as parquet: {' '.join(str(error).split())}")
