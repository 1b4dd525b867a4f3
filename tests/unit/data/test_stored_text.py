from __future__ import annotations

import hashlib
import math
import pickle
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.clips import make_clip, picture
from support.tables import clip_row, raw_row, write_table

from osora_cli.app.data.meta import make_meta
from osora_cli.data import stored_text
from osora_cli.data.loader import ClipLoader
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.stored_text import StoredColumn, find_stored_text
from osora_cli.data.table import COLUMNS, ClipTable
from osora_cli.errors import DataError


def _rows(count: int) -> list[dict[str, Any]]:
    texts = ["None", "", "ein Wort, zwei", 'she said "no"', "line\nbreak", "007", "日本"]
    rows = [raw_row(f"c{i}.mp4", texts[i % len(texts)], 20 + i, 64, 96, 24.0) for i in range(count - 1)]
    return [*rows, raw_row("still.png", "a still", 1, 64, 96, math.nan)]


def _arrow(rows: list[dict[str, Any]], **others: Any) -> pa.Table:
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in COLUMNS}
    columns["fps"] = [math.nan if value == "" else value for value in columns["fps"]]
    return pa.table({**columns, **others})


def _seeds_folder(path: Path, table: pa.Table, files: int) -> Path:
    """What Open-Sora's tool makes of a parquet table: a folder of its name, all columns but the six numbers."""
    folder = path.with_suffix("")
    folder.mkdir()
    size = -(-len(table) // files)
    kept = table.drop_columns(list(COLUMNS[2:]))
    for number in range(files):
        part = kept.slice(number * size, size)
        if len(part):
            pq.write_table(part, folder / f"{number + 1:05d}.parquet")
    return folder


def test_rows_read_on_demand_are_those_of_the_whole_table(tmp_path: Path) -> None:
    rows = _rows(23)
    path = tmp_path / "t.parquet"
    pq.write_table(_arrow(rows), path, row_group_size=5)
    whole, lazy = ClipTable.load(path), ClipTable.load(path, memory_efficient=True)
    assert isinstance(lazy.path, StoredColumn)
    assert lazy.notes == ("paths and captions stay on disk, in 5 row groups of up to 5 rows",)
    assert lazy.digest == whole.digest == ClipTable.load(write_table(tmp_path / "t.csv", rows)).digest
    assert len(lazy) == len(lazy.path) == 23
    for row in [22, 0, 4, 5, 9, 21, 10]:
        assert (lazy.path_of(row), lazy.text_of(row)) == (rows[row]["path"], rows[row]["text"])
    assert lazy.path.to_pylist() == whole.path.to_pylist()
    assert lazy.missing_files() == whole.missing_files() == list(range(23))
    (tmp_path / "c7.mp4").touch()
    assert lazy.missing_files() == [row for row in range(23) if row != 7]
    assert lazy.resolve(7) == tmp_path / "c7.mp4"


def test_only_the_group_of_a_row_is_read_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(_arrow(_rows(100)), path, row_group_size=10)
    stored = find_stored_text(path, 100)
    assert stored is not None
    loaded: list[int] = []
    load = type(stored)._load
    monkeypatch.setattr(type(stored), "_load", lambda self, number: loaded.append(number) or load(self, number))
    for row in (35, 31, 39, 72, 30):
        stored.read(row)
    assert loaded == [3, 7]
    monkeypatch.setattr(stored_text, "_CACHED_BYTES", 1)
    stored.read(5)
    assert len(stored._cache) == 1


def test_the_seeds_small_files_are_read(tmp_path: Path) -> None:
    """Its table holds the numbers and perhaps the paths, its folder paths and captions."""
    rows = _rows(23)
    table = _arrow(rows, score_vmafmotion=[float(i) for i in range(23)])
    path = tmp_path / "set.parquet"
    pq.write_table(table.drop_columns(["text"]), path)
    with pytest.raises(DataError, match="lacks columns: `text`"):
        ClipTable.load(path, memory_efficient=True)
    _seeds_folder(path, table, 6)
    lazy = ClipTable.load(path, memory_efficient=True)
    assert lazy.notes == ("paths and captions stay on disk, in 6 files of up to 4 rows",)
    whole = tmp_path / "whole.parquet"
    pq.write_table(table, whole)
    assert lazy.digest == ClipTable.load(whole).digest
    assert [lazy.text_of(row) for row in range(23)] == [row["text"] for row in rows]
    assert lazy.score_vmafmotion is not None


def test_small_files_serve_where_the_tables_own_groups_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _arrow(_rows(23))
    path = tmp_path / "set.parquet"
    pq.write_table(table, path)
    _seeds_folder(path, table, 6)
    assert len(find_stored_text(path, 23).files) == 1  # type: ignore[union-attr]
    monkeypatch.setattr(stored_text, "LARGE_GROUP", 10)
    assert len(find_stored_text(path, 23).files) == 6  # type: ignore[union-attr]


def test_files_that_do_not_make_up_the_table_are_refused(tmp_path: Path) -> None:
    table = _arrow(_rows(23))
    path = tmp_path / "set.parquet"
    pq.write_table(table.drop_columns(["text"]), path)
    folder = _seeds_folder(path, table, 6)
    (folder / "00006.parquet").unlink()
    with pytest.raises(DataError, match="has 5 files of 4 rows, and its table has 23 rows"):
        ClipTable.load(path, memory_efficient=True)
    pq.write_table(table.slice(20, 3), folder / "00006.parquet")
    stored = ClipTable.load(path, memory_efficient=True).path.store
    pq.write_table(table.slice(0, 2), folder / "00003.parquet")
    with pytest.raises(DataError, match=r"00003.parquet` holds 2 rows of path, text; 4 rows of path, text are"):
        pickle.loads(pickle.dumps(stored)).read(9)  # noqa: S301
    (folder / "00003.parquet").unlink()
    with pytest.raises(DataError, match=r"00003.parquet` cannot be read"):
        pickle.loads(pickle.dumps(stored)).read(10)  # noqa: S301
    (folder / "00001.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"00001.parquet` cannot be read as parquet"):
        ClipTable.load(path, memory_efficient=True)


def test_a_table_that_is_no_parquet_is_refused_with_the_way_there(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", _rows(3))
    with pytest.raises(DataError, match="is no parquet file") as caught:
        ClipTable.load(path, memory_efficient=True)
    assert caught.value.hint == f"osora data meta --input {path} --output {tmp_path / 't.parquet'}"
    with pytest.raises(DataError, match="does not exist"):
        ClipTable.load(tmp_path / "none.csv", memory_efficient=True)


def test_empty_paths_and_rates_are_found_on_disk_too(tmp_path: Path) -> None:
    rows = _rows(12)
    rows[8]["path"] = ""
    path = tmp_path / "t.parquet"
    pq.write_table(_arrow(rows), path, row_group_size=5)
    with pytest.raises(DataError, match="1 row has an empty `path`") as caught:
        ClipTable.load(path, memory_efficient=True)
    assert caught.value.where == f"{path}, row 8 (the first is row 0)"
    rows = _rows(12)
    rows[7]["fps"] = ""
    pq.write_table(_arrow(rows), path, row_group_size=5)
    with pytest.raises(DataError, match="row 7, column `fps`: is empty"):
        ClipTable.load(path, memory_efficient=True)


def test_data_meta_writes_groups_of_a_size_to_be_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        Image.fromarray(picture(i)).save(tmp_path / f"{i}.png")
    monkeypatch.setattr("osora_cli.data.meta_output._GROUP_ROWS", 2)
    make_meta(tmp_path, tmp_path / "t.parquet")
    stored = find_stored_text(tmp_path / "t.parquet", 5)
    assert stored is not None
    assert stored.starts.tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_same_pixels_and_captions(tmp_path: Path, workers: int) -> None:
    rows = [clip_row(make_clip(tmp_path / f"{i}.mp4", 12, (96, 64), 12, first=i), f"clip {i}") for i in range(5)]
    rows[2]["path"] = str(tmp_path / "gone.mp4")
    path = tmp_path / "t.parquet"
    pq.write_table(_arrow(rows), path, row_group_size=2)
    seen = []
    for lazy in (False, True):
        table = ClipTable.load(path, memory_efficient=lazy)
        columns = (table.num_frames, table.height, table.width, table.fps)
        config = {"78px_ar2:1": {5: (1.0, 2)}}
        sampler = BucketSampler(*columns, bucket_config=config, spatial_compression=16, fps_max=12, drop_last=False)
        with closing(ClipLoader(table, seed=1, fps_max=12, num_workers=workers, max_bad_fraction=1)) as reader:
            batches = list(reader.read(sampler.epoch_batches(0), 0))
        seen.append([(hashlib.sha1(b.video.numpy()).hexdigest(), b.texts, b.rows, b.replaced) for b in batches])
    assert seen[0] == seen[1]
    assert sum(len(replaced) for *_, replaced in seen[1]) >= 1


def test_workers_get_where_text_lies_and_not_the_text(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(_arrow(_rows(2000)), path, row_group_size=1000)
    table = ClipTable.load(path, memory_efficient=True)
    stored = table.path.store
    stored.read(3)
    copy = pickle.loads(pickle.dumps(stored))  # noqa: S301
    assert len(copy._cache) == len(copy._open) == 0
    assert copy.read(1999) == ("still.png", "a still")
    assert len(pickle.dumps(stored)) < 1500
    reader = ClipLoader(table, seed=0, fps_max=None)
    assert reader._source(7).paths == ()
    assert re.search("c7.mp4", str(reader._loader.dataset._options.names.name(reader._source(7)).paths))  # type: ignore
    assert np.all(table.num_frames[:3] == [20, 21, 22])
