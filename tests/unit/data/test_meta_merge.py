"""`data meta --merge`: scores and captions of other tables, joined by path; and a table written over itself."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.clips import make_clip

from osora_cli.app.data.meta import make_meta
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError, UsageError


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, *rows: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return path


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A table of three clips with captions, the third without."""
    for name in ("a.mp4", "b, c.mp4", "d.mp4"):
        make_clip(tmp_path / name, frames=4)
    rows = (["a.mp4", "one"], ["b, c.mp4", "None"], ["d.mp4", ""])
    return write(tmp_path / "clips.csv", ["path", "text"], *rows)


def test_scores_come_behind_and_nothing_is_doubled_or_dropped(clips: Path, tmp_path: Path) -> None:
    scores = write(
        tmp_path / "scores.csv",
        ["text", "path", "aes", "score_vmafmotion", "num_frames"],
        ["other words", "d.mp4", "5.25", "3.6", ""],
        ["two", "b, c.mp4", "NA", "", "4"],
        ["", "away.mp4", "1", "1", "9"],
    )
    output = tmp_path / "out.csv"
    result = make_meta(clips, output, merge=[scores])
    rows = read(output)
    assert list(rows[0]) == ["path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps",
                             "aes", "score_vmafmotion"]  # fmt: skip
    assert [row["path"] for row in rows] == ["a.mp4", "b, c.mp4", "d.mp4"]
    assert [row["text"] for row in rows] == ["one", "None", "other words"]
    assert [row["aes"] for row in rows] == ["", "NA", "5.25"]
    assert [row["num_frames"] for row in rows] == ["4", "4", "4"]
    assert result.notes == (
        f"`{scores}` is merged into 2 of 3 rows; 1 of its paths are no clip of the table (first: `away.mp4`)",
        "`text` of 1 row has another value in the merged table; the table's own is kept",
    )
    scored = ClipTable.load(output).score_vmafmotion
    assert scored is not None
    assert math.isnan(scored[0])
    assert scored[2] == 3.6
    # Again, with the same scores, over the output: nothing changes.
    before = output.read_bytes()
    make_meta(output, output, merge=[scores])
    assert output.read_bytes() == before


def test_several_tables_one_after_the_other_and_gaps_are_filled(clips: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "1.csv", ["path", "aes"], ["a.mp4", "1"], ["b, c.mp4", ""])
    second = write(tmp_path / "2.csv", ["path", "aes", "flow"], ["a.mp4", "2"] + ["7"], ["b, c.mp4", "3", "8"])
    output = tmp_path / "out.csv"
    result = make_meta(clips, output, merge=[first, second])
    assert [(row["aes"], row["flow"]) for row in read(output)] == [("1", "7"), ("3", "8"), ("", "")]
    assert "`aes` of 1 row has another value" in result.notes[-1]


@pytest.mark.parametrize("written", ["{top}/{name}", "../{name}", "./{name}"])
def test_paths_written_in_another_way_are_the_same_file(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [[written.format(top=tmp_path, name=name), name] for name in ("a.mp4", "b, c.mp4", "d.mp4")]
    folder = tmp_path / "scores" if written.startswith("..") else tmp_path
    scores = write(folder / "s.csv", ["path", "said"], *rows)
    make_meta(clips, tmp_path / "out.csv", merge=[scores])
    assert [row["said"] for row in read(tmp_path / "out.csv")] == ["a.mp4", "b, c.mp4", "d.mp4"]


def test_a_folder_of_clips_with_a_table_of_captions(clips: Path, tmp_path: Path) -> None:
    result = make_meta(tmp_path, tmp_path / "out.csv", merge=[clips])
    assert [row["text"] for row in read(tmp_path / "out.csv")] == ["one", "None", ""]
    assert result.notes == (
        "1 of the folder's entries are passed over (.csv: 1)",
        f"`{clips}` is merged into 3 of 3 rows",
    )


def test_columns_of_parquet_keep_their_type(clips: Path, tmp_path: Path) -> None:
    scores = tmp_path / "s.parquet"
    pq.write_table(pa.table({"path": ["d.mp4", "a.mp4"], "aes": [2.5, math.nan], "tags": [["x"], None]}), scores)
    output = tmp_path / "out.parquet"
    make_meta(clips, output, merge=[scores])
    made = pq.read_table(output)
    assert made.column("aes").type == pa.float64()
    assert made.column("aes").to_pylist()[1:] == [None, 2.5]
    assert made.column("tags").to_pylist() == [None, None, ["x"]]
    pq.write_table(pa.table({"path": ["a.mp4"], "aes": [7.0]}), scores)
    make_meta(output, tmp_path / "more.parquet", merge=[scores])
    assert pq.read_table(tmp_path / "more.parquet").column("aes").to_pylist() == [7.0, None, 2.5]


def test_what_cannot_be_joined_is_refused(clips: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"

    def refusal(*rows: list[str]) -> DataError:
        with pytest.raises(DataError) as caught:
            make_meta(clips, output, merge=[write(tmp_path / "s.csv", *rows)])
        assert not output.exists()
        return caught.value

    assert (
        "has no column `path` to be merged by (it has: `file`, `aes`)"
        in refusal(["file", "aes"], ["a.mp4", "1"]).message
    )
    two = refusal(["path", "aes"], ["a.mp4", "1"], ["d.mp4", "1"], ["a.mp4", "2"])
    assert two.message == "path `a.mp4` stands in rows 0 and 2, with `aes` `1` and `2`"
    assert two.where == f"{tmp_path / 's.csv'}:4"
    none = refusal(["path", "aes"], ["x/a.mp4", "1"])
    assert "no path of table" in none.message
    assert none.where == "`x/a.mp4` there, `a.mp4` here"
    assert "no path" in refusal(["path", "aes"]).message
    assert "fields" in refusal(["path", "aes"], ["a.mp4", "1", "2"]).message
    scores = write(tmp_path / "s.csv", ["path", "aes"], ["a.mp4", "1"])
    before = scores.read_bytes()
    with pytest.raises(UsageError, match="one of the tables to merge"):
        make_meta(clips, scores, merge=[scores])
    assert scores.read_bytes() == before
    # The same said twice is one.
    same = write(tmp_path / "s.csv", ["path", "aes"], ["a.mp4", "1"], ["a.mp4", "1"])
    assert make_meta(clips, output, merge=[same]).rows == 3


def test_two_spellings_of_one_file_that_say_different_things(clips: Path, tmp_path: Path) -> None:
    scores = write(tmp_path / "s.csv", ["path", "aes"], ["./a.mp4", "3"], ["././a.mp4", "9"])
    with pytest.raises(DataError, match=r"file `.*a\.mp4` stands in rows 0 and 1, with `aes` `3` and `9`"):
        make_meta(clips, tmp_path / "out.csv", merge=[scores])
    same = write(tmp_path / "same.csv", ["path", "aes"], ["./a.mp4", "3"], ["././a.mp4", "3"])
    make_meta(clips, tmp_path / "out.csv", merge=[same])
    assert read(tmp_path / "out.csv")[0]["aes"] == "3"


def test_a_table_written_over_itself_loses_no_row_unasked(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "d.mp4").unlink()
    before = clips.read_bytes()
    with pytest.raises(DataError) as caught:
        make_meta(clips, clips)
    assert clips.read_bytes() == before
    assert "1 of 3 files" in caught.value.message
    assert "`d.mp4`: no such file" in caught.value.message
    assert "--on-error skip" in (caught.value.hint or "")
    # What was found out is not lost: only the other file would be looked at again.
    assert list(tmp_path.glob(".clips.csv.progress/*.jsonl"))
    assert make_meta(clips, clips, on_error="keep").rows == 3
    assert not list(tmp_path.glob(".clips.csv.progress"))
    assert [row["num_frames"] for row in read(clips)] == ["4", "4", ""]
    with pytest.raises(DataError, match="is empty") as caught:
        ClipTable.load(clips)
    assert (
        caught.value.hint == f"osora data meta --input {clips} --output {tmp_path / 'clips_meta.csv'} --on-error skip"
    )
    # The cure is one.
    assert make_meta(clips, tmp_path / "clips_meta.csv", on_error="skip").rows == 2
    assert len(ClipTable.load(tmp_path / "clips_meta.csv")) == 2
    assert make_meta(clips, clips, on_error="skip").rows == 2
    assert [row["path"] for row in read(clips)] == ["a.mp4", "b, c.mp4"]


def test_a_clip_given_as_a_table_is_said(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "a clip.mp4", frames=4)
    with pytest.raises(DataError, match=r"a clip.mp4` is a clip, not a table") as caught:
        make_meta(clip, tmp_path / "out.csv")
    assert "--input FOLDER" in (caught.value.hint or "")
