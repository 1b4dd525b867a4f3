"""Tables of clips: read as they are written, or refused with file, row and column."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osora_cli.data.table import COLUMNS, ClipTable
from osora_cli.data.text_table import read_text_table
from osora_cli.errors import DataError

HEADER = ",".join(COLUMNS)


def row(path: str = "a.mp4", text: str = "a cat", rest: str = "40,64,96,0.6666666666666666,6144,24.0") -> str:
    return f"{path},{text},{rest}"


def write(path: Path, *lines: str, header: str = HEADER, encoding: str = "utf-8") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n", encoding=encoding)
    return path


def refused(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        ClipTable.load(path)
    assert caught.value.exit_code == 3
    return caught.value


def test_columns_and_types(tmp_path: Path) -> None:
    table = ClipTable.load(write(tmp_path / "t.csv", row(), row("b.png", "", "1,192,64,3.0,12288,")))
    assert len(table) == 2
    assert table.path.to_pylist() == ["a.mp4", "b.png"]
    assert table.text.to_pylist() == ["a cat", ""]
    assert table.num_frames.dtype == table.height.dtype == table.width.dtype == np.int64
    assert table.num_frames.tolist() == [40, 1]
    assert table.height.tolist() == [64, 192]
    assert table.width.tolist() == [96, 64]
    assert table.aspect_ratio.tolist() == [64 / 96, 3.0]
    assert table.resolution.tolist() == [6144, 12288]
    assert table.fps[0] == 24
    assert math.isnan(table.fps[1])
    assert (table.path_of(1), table.text_of(0)) == ("b.png", "a cat")
    assert table.score_vmafmotion is None
    assert table.notes == ()


WORDS = ["None", "NA", "null", "nan", "N/A", "007", "2024", "1e5", "true", "", " spaced ", "ünï 漢字 🎬", "-", "#x"]


def test_captions_and_paths_are_text_always(tmp_path: Path) -> None:
    lines = [row(path=word or "x", text=word) for word in WORDS]
    table = ClipTable.load(write(tmp_path / "t.csv", *lines))
    assert table.text.to_pylist() == WORDS
    assert table.path.to_pylist() == [word or "x" for word in WORDS]


def test_quotes_commas_and_line_breaks_in_fields(tmp_path: Path) -> None:
    lines = [row('"a, b.mp4"', '"says ""hi"", then\r\n\nleaves"'), row("-x.mp4", 'a 5" screen'), row("c.mp4", '"\'"')]
    table = ClipTable.load(write(tmp_path / "t.csv", *lines))
    assert table.path.to_pylist() == ["a, b.mp4", "-x.mp4", "c.mp4"]
    assert table.text.to_pylist() == ['says "hi", then\r\n\nleaves', 'a 5" screen', "'"]


def test_byte_order_mark_crlf_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n\r\n{row()}\r\n\r\n".encode())
    assert ClipTable.load(path).path.to_pylist() == ["a.mp4"]


@pytest.mark.parametrize(("delimiter", "said"), [(";", "`;`"), ("\t", "tab"), ("|", "`|`")])
def test_other_delimiters_are_recognised_and_said(delimiter: str, said: str, tmp_path: Path) -> None:
    plain = ClipTable.load(write(tmp_path / "plain.csv", row(text='"one, two"')))
    path = tmp_path / "other.csv"
    path.write_text((HEADER + "\n" + row(text="one@ two") + "\n").replace(",", delimiter).replace("@", ","))
    table = ClipTable.load(path)
    assert table.text.to_pylist() == ["one, two"]
    assert table.notes == (f"the columns of `{path}` are separated by {said}, not by commas",)
    assert table.digest == plain.digest


def test_an_unquoted_comma_never_shifts_columns(tmp_path: Path) -> None:
    # pandas takes the path for an index when it is the first row that is too long.
    for place in (0, 1, 12_345):
        lines = [row()] * place + [row(text="a cat, a dog")] + [row()] * 3
        error = refused(write(tmp_path / "t.csv", *lines))
        assert error.message == "the row has 9 fields, the header 8"
        assert error.where == f"{tmp_path / 't.csv'}:{place + 2}"
        assert error.hint == "fields with commas in them stand in quotes"
    error = refused(write(tmp_path / "t.csv", row(text='"two\nlines"'), "a.mp4,short,40"))
    assert error.message == "the row has 3 fields, the header 8"
    assert error.where == f"{tmp_path / 't.csv'}:4"


@pytest.mark.parametrize("caption", ['"never closed', '"closed" too early'])
def test_quotes_that_do_not_match(caption: str, tmp_path: Path) -> None:
    error = refused(write(tmp_path / "t.csv", row(), row(text=caption), row()))
    assert error.message.startswith("quotes do not match")
    assert error.where == f"{tmp_path / 't.csv'}:3"


def test_the_header_again_among_the_rows(tmp_path: Path) -> None:
    error = refused(write(tmp_path / "t.csv", row(), HEADER, row()))
    assert (error.message, error.where) == ("the header stands again among the rows", f"{tmp_path / 't.csv'}:3")


def test_names_used_twice(tmp_path: Path) -> None:
    error = refused(write(tmp_path / "t.csv", row() + ",1", header=HEADER + ",height"))
    assert error.message == "column names used more than once: `height`"


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("\n".join([HEADER, row(), row(text="it’s"), ""]).encode("cp1252"))
    error = refused(path)
    assert error.message == f"table `{path}` is not UTF-8: byte 0x92 at byte 9 of line 3"
    assert error.where == f"{path}:3"
    assert error.hint is not None
    assert "iconv -f cp1252 -t utf-8" in error.hint
    path.write_bytes(f"{HEADER}\n{row()}\n".encode("utf-16"))
    assert refused(path).message == f"table `{path}` is UTF-16, not UTF-8"
    write(path, row(), row(text="a\0b"))
    assert (refused(path).message, refused(path).where) == ("the row holds a zero byte", f"{path}:3")


def test_all_missing_columns_at_once_with_the_cure(tmp_path: Path) -> None:
    path = write(tmp_path / "clips.csv", "a.mp4,a cat,64", header="path,text,height")
    error = refused(path)
    assert error.message == (
        f"table `{path}` lacks columns: `num_frames`, `width`, `aspect_ratio`, `resolution`, `fps` "
        "(it has: `path`, `text`, `height`)"
    )
    assert error.hint == f"osora data meta --input {path} --output {tmp_path / 'clips_meta.csv'}"
    error = refused(write(tmp_path / "clips.csv", "a.mp4,a cat", header="video,caption"))
    assert "`path`" in error.message
    assert error.hint is not None
    assert "header" in error.hint


def test_no_table_and_no_rows(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone.csv").message == f"table `{tmp_path / 'gone.csv'}` does not exist"
    assert refused(tmp_path).message == f"table `{tmp_path}` is not a file"
    (tmp_path / "empty.csv").touch()
    assert "has no header" in refused(tmp_path / "empty.csv").message
    assert "a header and no rows" in refused(write(tmp_path / "bare.csv")).message
    (tmp_path / "t.parquet").write_bytes(b"no parquet")
    assert "cannot be read as parquet" in refused(tmp_path / "t.parquet").message


def test_numbers_that_cannot_be_are_named_with_row_and_column(tmp_path: Path) -> None:
    lines = [
        row(),
        row(text='"two\nlines"', rest="abc,64,96.5,0.6,6144,24"),
        row(rest=",0,96,0.6,inf,24"),
        row(rest="40,64,-96,0.6,6144,"),
        row("still.png", rest="1,64,96,0.6,6144,"),
    ]
    path = write(tmp_path / "t.csv", *lines)
    error = refused(path)
    assert error.message == (
        f"7 values of table `{path}` cannot be used: row 1, column `num_frames`: `abc` is not a number; "
        "row 1, column `width`: `96.5` is not a whole number of at least 1; "
        "row 2, column `height`: `0` is not a whole number of at least 1; "
        "row 2, column `num_frames`: is empty; "
        "row 2, column `resolution`: `inf` is not a number above 0 and 2 more"
    )
    assert error.where == f"{path}:3"


def test_whole_numbers_may_be_written_as_pandas_writes_them(tmp_path: Path) -> None:
    table = ClipTable.load(write(tmp_path / "t.csv", row(rest=" 40.0 ,64.0,96.0,0.6666,6144.0,24")))
    assert (table.num_frames[0], table.height[0], table.width[0]) == (40, 64, 96)


def test_other_columns_are_tolerated_and_the_score_is_kept(tmp_path: Path) -> None:
    header = HEADER + ",aes,score_vmafmotion,flow"
    table = ClipTable.load(write(tmp_path / "t.csv", row() + ",x,3.5,", row() + ",,,", header=header))
    assert table.score_vmafmotion is not None
    assert table.score_vmafmotion[0] == 3.5
    assert math.isnan(table.score_vmafmotion[1])


def test_contradictions_are_said(tmp_path: Path) -> None:
    # Width by height, as some tools write it, in one row of two.
    table = ClipTable.load(write(tmp_path / "t.csv", row(), row(rest="40,64,96,1.5,6144,24")))
    assert table.notes == ("`aspect_ratio` is not height / width in 1 of 2 rows; height and width are used",)


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    first = ClipTable.load(write(tmp_path / "a.csv", row(), row("b.png", "", "1,64,96,0.6667,6144,")))
    arrays = {
        "text": pa.array(["a cat", None], pa.string()).dictionary_encode(),
        "path": ["a.mp4", "b.png"],
        "num_frames": pa.array([40, 1], pa.int32()),
        "height": [64.0, 64.0],
        "width": [96, 96],
        "aspect_ratio": [0.6667, 0.6667],
        "resolution": [6144, 6144],
        "fps": [24.0, math.nan],
        "more": [[1, 2], []],
    }
    pq.write_table(pa.table(arrays), tmp_path / "b.parquet", row_group_size=1)
    second = ClipTable.load(tmp_path / "b.parquet")
    assert second.text.to_pylist() == ["a cat", ""]
    assert first.digest == second.digest
    assert len(first.digest) == 32
    others = [
        [row("b.mp4"), row("b.png", "", "1,64,96,0.6667,6144,")],
        [row("a.mp4b", " cat"), row("b.png", "", "1,64,96,0.6667,6144,")],
        [row("b.png", "", "1,64,96,0.6667,6144,"), row()],
        [row(rest="41,64,96,0.6667,6144,24.0"), row("b.png", "", "1,64,96,0.6667,6144,")],
        [row(rest="40,64,96,0.6667,6144,24.001"), row("b.png", "", "1,64,96,0.6667,6144,")],
    ]
    digests = {ClipTable.load(write(tmp_path / "c.csv", *lines)).digest for lines in others}
    assert len(digests | {first.digest}) == 6


def test_files_are_looked_for_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("cwd", "table", "root")}
    for place in places.values():
        place.mkdir()
    monkeypatch.chdir(places["cwd"])
    path = write(places["table"] / "t.csv", row("x.mp4"), row(str(tmp_path / "absolute.mp4")))
    table = ClipTable.load(path, places["root"])
    assert table.missing_files() == [0, 1]
    with pytest.raises(DataError) as caught:
        table.resolve(0)
    tried = f"`x.mp4`, `{places['table'] / 'x.mp4'}`, `{places['root'] / 'x.mp4'}`"
    assert caught.value.hint == f"tried {tried}"
    error = table.missing_files_error(table.missing_files())
    assert error.message.startswith("2 of 2 files of the table do not exist: `x.mp4` (row 0), ")
    assert error.hint is not None
    assert tried in error.hint
    for name in ("root", "table", "cwd"):
        (places[name] / "x.mp4").touch()
        assert table.resolve(0).resolve() == places[name] / "x.mp4"
    assert table.missing_files() == [1]
    (tmp_path / "absolute.mp4").touch()
    assert table.missing_files() == []


def test_the_same_path_twice_is_two_rows(tmp_path: Path) -> None:
    assert len(ClipTable.load(write(tmp_path / "t.csv", row(), row(text="again")))) == 2


def test_long_captions_and_many_rows(tmp_path: Path) -> None:
    long = "word " * 20_000
    lines = [row(text=long)] + [row(path=f"{number}.mp4") for number in range(25_000)]
    table = ClipTable.load(write(tmp_path / "t.csv", *lines))
    assert len(table) == 25_001
    assert table.text_of(0) == long
    assert table.path_of(25_000) == "24999.mp4"


def test_where_a_row_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", row(text='"a\n\nb"'), "", row(), row())
    assert [read_text_table(path).where(number) for number in range(3)] == [f"{path}:2", f"{path}:6", f"{path}:7"]
