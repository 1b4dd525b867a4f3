"""Tables as others write them: names of columns, fields of any length, numbers that are none, parquet of every type."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.clips import picture

from osora_cli.app.data.meta import make_meta
from osora_cli.data.table import COLUMNS, ClipTable
from osora_cli.errors import DataError

HEADER = ",".join(COLUMNS)
ROW = "{path},{text},1,64,96,0.6667,6144,"


@pytest.fixture
def still(tmp_path: Path) -> str:
    Image.fromarray(picture(1)).save(tmp_path / "a.png")
    return "a.png"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def refused(path: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        ClipTable.load(path, **options)
    return caught.value


def columns(still: str, **others: Any) -> pa.Table:
    plain = {
        "path": [still, still],
        "text": ["a", "b"],
        "num_frames": [1, 1],
        "height": [64, 64],
        "width": [96, 96],
        "aspect_ratio": [64 / 96] * 2,
        "resolution": [6144, 6144],
        "fps": [24.0, 24.0],
    }
    return pa.table({**plain, **others})


@pytest.mark.parametrize(
    ("header", "wrong", "meant"),
    [
        ("path, text, num_frames", " text", "text"),
        ("path;text ;num_frames", "text ", "text"),
        ("Path,text,num_frames", "Path", "path"),
        ("path,TEXT,num_frames", "TEXT", "text"),
        ("path,text, num_frames", " num_frames", "num_frames"),
    ],
)
def test_names_that_are_nearly_those_of_the_eight(
    header: str, wrong: str, meant: str, still: str, tmp_path: Path
) -> None:
    # Taken for other columns, captions would be left empty without a word.
    source = write(tmp_path / "t.csv", header, ";".join([still, "x", "1"]) if ";" in header else f"{still},x,1")
    with pytest.raises(DataError) as caught:
        make_meta(source, tmp_path / "out.csv")
    assert caught.value.message.startswith(f"column `{wrong}` is not `{meant}`")
    assert caught.value.where == f"{source}:1"
    assert not (tmp_path / "out.csv").exists()
    assert refused(source).message == caught.value.message


def test_other_names_in_other_letters_are_other_columns(still: str, tmp_path: Path) -> None:
    source = write(tmp_path / "t.csv", "path,text,Text,FPS", f"{still},a,b,7")
    make_meta(source, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines()[0].startswith("path,text,Text,FPS,num_frames")


def test_captions_that_are_not_there_are_said(still: str, tmp_path: Path) -> None:
    source = write(tmp_path / "t.csv", "path,Caption", f"{still},a cat")
    result = make_meta(source, tmp_path / "out.csv")
    assert result.notes == (
        f"table `{source}` has no column `text`: captions are left empty; "
        "should it be `Caption`, rename that to `text`",
    )


def test_a_caption_of_any_length(still: str, tmp_path: Path) -> None:
    caption = "word, " * 100_000
    source = write(tmp_path / "t.csv", "path,text", f'{still},"{caption}"')
    make_meta(source, tmp_path / "out.csv")
    assert ClipTable.load(tmp_path / "out.csv").text_of(0) == caption


def test_files_one_behind_the_other_with_their_marks(still: str, tmp_path: Path) -> None:
    one = "\ufeff" + HEADER + "\n" + ROW.format(path=still, text="x") + "\n"
    path = tmp_path / "t.csv"
    path.write_text(one + one, encoding="utf-8")
    error = refused(path)
    assert (error.message, error.where) == ("the header stands again among the rows", f"{path}:3")


def test_numbers_of_any_size_are_filled_anew(still: str, tmp_path: Path) -> None:
    wrong = ["9" * 30, "1e300", "1_0", "9" * 6000, "\u0661\u0662", "9007199254740993"]
    rows = [f"{still},x,{value},{value}" for value in wrong]
    source = write(tmp_path / "t.csv", "path,text,height,num_frames", *rows)
    for name in ("out.csv", "out.parquet"):
        result = make_meta(source, tmp_path / name)
        table = ClipTable.load(tmp_path / name)
        assert table.num_frames.tolist() == [1] * len(wrong)
        assert len(set(table.height.tolist())) == 1
        assert [note[:60] for note in result.notes] == [
            f"`{name}` of 6 rows is no number that can be, and is filled anew"[:60] for name in ("num_frames", "height")
        ]
    error = refused(write(tmp_path / "u.csv", HEADER, f"{still},x,1,6_4,{'9' * 6000}x,1,1,"))
    assert "`6_4` is not a number" in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_parquet_of_every_type(memory_efficient: bool, still: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    good = [
        {"text": pa.array([b"a", b"b"])},
        {"text": pa.array(["a", "b"]).dictionary_encode(), "path": pa.array([still, still], pa.large_string())},
        {"num_frames": pa.array([True, True]), "height": pa.array([64, 64], pa.uint64())},
        {"fps": pa.array([24, 24], pa.int8())},
        {"fps": ["24", " 24.0 "]},
    ]
    if hasattr(pa, "string_view"):
        good.append({"text": pa.array(["a", "b"], pa.string_view())})
    for others in good:
        pq.write_table(columns(still, **others), path)
        table = ClipTable.load(path, memory_efficient=memory_efficient)
        assert [table.text_of(0), table.text_of(1), table.path_of(0)] == ["a", "b", still]
        assert (table.num_frames[0], table.height[0], table.fps[0]) == (1, 64, 24)
    odd: dict[str, list[Any]] = {"list": [["a"], ["b"]], "struct": [{"k": 1}, {"k": 2}]}
    for name, values in itertools.product(("path", "text", "fps"), odd.values()):
        pq.write_table(columns(still, **{name: values}), path)
        assert f"column `{name}` of table " in refused(path, memory_efficient=memory_efficient).message
    pq.write_table(columns(still, text=[b"\xff", b"b"]), path)
    assert "holds `binary`, not text" in refused(path, memory_efficient=memory_efficient).message
    pq.write_table(columns(still, width=[datetime.datetime(2020, 1, 1)] * 2), path)
    assert "not numbers" in refused(path, memory_efficient=memory_efficient).message
    pq.write_table(columns(still, width=pa.array([2**63 + 5, 96], pa.uint64())), path)
    assert "is not a whole number" in refused(path, memory_efficient=memory_efficient).message


def test_meta_takes_captions_of_parquet_as_training_does(still: str, tmp_path: Path) -> None:
    source, output = tmp_path / "t.parquet", tmp_path / "out.csv"
    pq.write_table(pa.table({"path": [still.encode()], "text": ["é".encode()]}), source)
    make_meta(source, output)
    assert ClipTable.load(output).text_of(0) == "é"
    pq.write_table(pa.table({"path": [still], "text": [["a", "b"]]}), source)
    with pytest.raises(DataError, match=r"column `text` of table `.*` holds `list<.*>`, not text"):
        make_meta(source, output)


def test_a_zero_byte_is_not_written_to_a_csv_that_could_not_be_read_again(still: str, tmp_path: Path) -> None:
    source = tmp_path / "t.parquet"
    pq.write_table(pa.table({"path": [still], "text": ["a\0b"]}), source)
    with pytest.raises(DataError, match="`text` of row 0 holds a zero byte") as caught:
        make_meta(source, tmp_path / "out.csv")
    assert caught.value.hint == f"--output {tmp_path / 'out.parquet'}"
    make_meta(source, tmp_path / "out.parquet")
    assert ClipTable.load(tmp_path / "out.parquet").text_of(0) == "a\0b"


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="this pyarrow has no string_view")
def test_rows_are_left_out_of_columns_of_every_type(still: str, tmp_path: Path) -> None:
    source = tmp_path / "t.parquet"
    others = {
        "view": pa.array(["1", "2"], pa.string_view()),
        "words": pa.array(["1", "2"]).dictionary_encode(),
        "tags": [["a"], None],
        "kind": [None, {"k": 1}],
    }
    pq.write_table(pa.table({"path": ["gone.mp4", still], **others}), source)
    make_meta(source, tmp_path / "out.parquet")
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert [row[name] for name in others] == ["2", "2", None, {"k": 1}]
