"""`data meta`: what is there is kept, what is missing is filled, and running it again changes nothing."""

from __future__ import annotations

import csv
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.clips import make_clip, picture, real_clips, trim_by_edit_list

from osora_cli.app.data.meta import make_meta
from osora_cli.data.media import probe, read_frames
from osora_cli.data.table import COLUMNS, ClipTable
from osora_cli.errors import DataError, SetupError, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips and stills of several kinds, two files that are none, and things that are not looked at."""
    top = tmp_path_factory.mktemp("media") / "clips"
    (top / "sub" / "deeper").mkdir(parents=True)
    make_clip(top / "b.mp4", frames=12)
    make_clip(top / "a, b.mkv", frames=10, size=(64, 192), fps=30)
    make_clip(top / "sub" / "Upright.MOV", frames=9, size=(64, 96), rotate=90)
    make_clip(top / "sub" / "c.webm", frames=8, codec="libvpx", bframes=None)
    make_clip(top / "sub" / "deeper" / "-d.ts", frames=7, fps=24000 / 1001)
    trim_by_edit_list(make_clip(top / "sub" / "trimmed.mp4", frames=40), 5, 20, 24)
    Image.fromarray(picture(1)).save(top / "still.png")
    (top / "broken.mp4").write_bytes(b"\0" * 5000)
    (top / "sub" / "empty.avi").touch()
    (top / "notes.txt").write_text("not looked at")
    (top / "._b.mp4").write_text("what macOS leaves behind")
    (top / ".hidden").mkdir()
    make_clip(top / ".hidden" / "e.mp4", frames=3)
    (top / "again").symlink_to(top / "sub")
    return top


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, *rows: list[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def test_a_folder_becomes_a_table_that_training_reads(folder: Path) -> None:
    output = folder.parent / "meta.csv"
    seen: list[tuple[int, int]] = []
    result = make_meta(folder, output, progress=lambda done, total: seen.append((done, total)))
    assert output.read_text() == (
        "path,text,num_frames,height,width,aspect_ratio,resolution,fps\n"
        '"clips/a, b.mkv",,10,192,64,3.0,12288,30.0\n'
        "clips/b.mp4,,12,64,96,0.6666666666666666,6144,24.0\n"
        "clips/still.png,,1,64,96,0.6666666666666666,6144,\n"
        "clips/sub/Upright.MOV,,9,96,64,1.5,6144,24.0\n"
        "clips/sub/c.webm,,8,64,96,0.6666666666666666,6144,24.0\n"
        "clips/sub/deeper/-d.ts,,7,64,96,0.6666666666666666,6144,23.976\n"
        "clips/sub/trimmed.mp4,,20,64,96,0.6666666666666666,6144,24.0\n"
    )
    assert (result.rows, result.probed, result.output) == (7, 9, output)
    assert [path for path, _ in result.bad] == ["clips/broken.mp4", "clips/sub/empty.avi"]
    assert result.notes == ("2 of the folder's entries are passed over (linked folder: 1, .txt: 1)",)
    assert result.bad_report == folder.parent / "meta.bad.csv"
    assert read(result.bad_report) == [{"path": path, "reason": reason} for path, reason in result.bad]
    assert (seen[0], seen[-1]) == ((0, 9), (9, 9))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["clips", "meta.bad.csv", "meta.csv"]
    table = ClipTable.load(output)
    assert table.missing_files() == []
    for row in range(len(table)):
        assert read_frames(table.resolve(row), range(int(table.num_frames[row]))).shape[1:3] == (
            table.height[row],
            table.width[row],
        )


@pytest.mark.parametrize("ext", ["csv", "parquet"])
def test_running_it_on_its_own_output_changes_no_byte(ext: str, folder: Path) -> None:
    first, second = folder.parent / f"first.{ext}", folder.parent / f"second.{ext}"
    make_meta(folder, first)
    before = first.read_bytes()
    again = make_meta(first, second)
    assert second.read_bytes() == before
    assert (again.bad, again.bad_report, again.probed) == ([], None, 0)
    make_meta(first, first)
    assert first.read_bytes() == before
    assert first.with_name("first.bad.csv").exists(), "what was left out stays on record"


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_result_does_not_depend_on_the_number_of_workers(
    workers: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = folder.parent
    alone = make_meta(folder, here / "alone.csv", num_workers=0)
    seen: list[int] = []
    result = make_meta(folder, here / "many.csv", num_workers=workers, progress=lambda done, total: seen.append(done))
    assert (here / "many.csv").read_bytes() == (here / "alone.csv").read_bytes()
    assert (here / "many.bad.csv").read_bytes() == (here / "alone.bad.csv").read_bytes()
    assert (result.rows, result.bad) == (alone.rows, alone.bad)
    assert seen == sorted(seen)
    assert seen[-1] == 9
    assert capfd.readouterr() == ("", "")


def test_columns_rows_and_values_that_are_there_are_kept(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=12)
    make_clip(tmp_path / "b.mp4", frames=9, size=(64, 96), fps=30)
    source = write(
        tmp_path / "in.csv",
        ["id", "height", "text", "fps", "path", "num_frames", "score"],
        ["007", "", "None", "", "b.mp4", "", "1e5"],
        ["a,b", "", "007", "12.50", "a.mp4", "10.0", "NA"],
        ["", "", "", "", "b.mp4", "", ""],
    )
    result = make_meta(source, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == (
        "id,height,text,fps,path,num_frames,score,width,aspect_ratio,resolution\n"
        "007,96,None,30.0,b.mp4,9,1e5,64,1.5,6144\n"
        '"a,b",64,007,12.50,a.mp4,10,NA,96,0.6666666666666666,6144\n'
        ",96,,30.0,b.mp4,9,,64,1.5,6144\n"
    )
    assert (result.rows, result.probed) == (3, 2), "a file that stands in two rows is looked at once"
    make_meta(tmp_path / "out.csv", tmp_path / "exact.csv", exact=True)
    assert [row["num_frames"] for row in read(tmp_path / "exact.csv")] == ["9", "12", "9"], "measured anew"


def test_values_that_cannot_be_are_filled_and_said(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=12)
    header = [*COLUMNS]
    source = write(tmp_path / "in.csv", header, ["a.mp4", "x", "0", "64.5", "nan", "abc", "None", "inf"])
    result = make_meta(source, tmp_path / "out.csv")
    assert list(read(tmp_path / "out.csv")[0].values())[2:] == ["12", "64", "96", "0.6666666666666666", "6144", "24.0"]
    assert [note.split(" ")[0] for note in result.notes] == ["`num_frames`", "`height`", "`aspect_ratio`", "`fps`"]
    assert "first: `64.5`, row 0" in result.notes[1]


def test_a_still_with_all_its_numbers_is_not_looked_at(tmp_path: Path) -> None:
    Image.fromarray(picture(1)).save(tmp_path / "a.png")
    source = write(tmp_path / "in.csv", [*COLUMNS], ["a.png", "x", "1", "64", "96", "0.67", "6144", ""])
    assert make_meta(source, tmp_path / "out.csv").probed == 0
    assert read(tmp_path / "out.csv") == read(source)


def test_parquet_keeps_the_types_of_other_columns(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=12)
    Image.fromarray(picture(1)).save(tmp_path / "b.png")
    table = pa.table(
        {
            "tags": pa.array([["x", "y"], []], pa.list_(pa.string())),
            "path": pa.array(["a.mp4", "b.png"]),
            "text": pa.array([None, "2024"]),
            "num_frames": pa.array([None, 1.0]),
            "when": pa.array([1, None], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    make_meta(tmp_path / "in.parquet", tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column_names == [*table.column_names, "height", "width", "aspect_ratio", "resolution", "fps"]
    assert out["tags"].to_pylist() == [["x", "y"], []]
    assert out.schema.field("when").type == pa.timestamp("ms")
    assert out["text"].to_pylist() == ["", "2024"]
    assert out["num_frames"].to_pylist() == [12, 1]
    assert out.schema.field("num_frames").type == out.schema.field("resolution").type == pa.int64()
    assert out["fps"].to_pylist()[0] == 24.0
    assert math.isnan(out["fps"].to_pylist()[1])
    make_meta(tmp_path / "in.parquet", tmp_path / "out.csv")
    assert ClipTable.load(tmp_path / "out.csv").digest == ClipTable.load(tmp_path / "out.parquet").digest


def test_other_delimiters_become_commas(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=12)
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbfpath;text\r\na.mp4;one, two\r\n")
    result = make_meta(tmp_path / "in.csv", tmp_path / "in.csv")
    assert read(tmp_path / "in.csv")[0]["text"] == "one, two"
    assert "separated by `;`" in result.notes[0]


def test_odd_names_and_captions_survive_the_round(tmp_path: Path) -> None:
    words = ["x\r\ny", 'say "hi"', "a,b", " lead", "ünï 漢字 🎬", "'", "\t", "\r"]
    names = ["-x.mp4", "a, b.mp4", "new\nline.mp4", "50%.mp4", "#.mp4", '"q".mp4', "http:x.mp4", "影.mp4"]
    clip = make_clip(tmp_path / "clip.mp4", frames=4)
    for name in names:
        shutil.copy(clip, tmp_path / name)
    source = write(tmp_path / "in.csv", ["path", "text"], *(list(pair) for pair in zip(names, words, strict=True)))
    make_meta(source, tmp_path / "out.csv", num_workers=2)
    table = ClipTable.load(tmp_path / "out.csv")
    assert (table.path.to_pylist(), table.text.to_pylist()) == (names, words)
    assert table.num_frames.tolist() == [4] * 8
    before = (tmp_path / "out.csv").read_bytes()
    make_meta(tmp_path / "out.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == before


def test_a_folder_is_written_so_that_it_is_found_from_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clips").mkdir()
    make_clip(tmp_path / "clips" / "a.mp4", frames=4)
    monkeypatch.chdir(tmp_path)
    for output, written in (
        (Path("t.csv"), "clips/a.mp4"),
        (Path("clips/t.csv"), "a.mp4"),
        (Path("other/t.csv"), str(tmp_path / "clips" / "a.mp4")),
    ):
        make_meta(Path("clips"), output)
        assert ClipTable.load(output).path.to_pylist() == [written]
    monkeypatch.chdir("/")
    for name in ("t.csv", "clips/t.csv", "other/t.csv"):
        assert ClipTable.load(tmp_path / name).missing_files() == []


def test_paths_that_only_the_input_folder_makes_good_are_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    make_clip(tmp_path / "in" / "sub" / "a.mp4", frames=4)
    make_clip(tmp_path / "root" / "r.mp4", frames=5)
    make_clip(tmp_path / "c.mp4", frames=6)
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in" / "t.csv", ["path"], ["sub/a.mp4"], ["r.mp4"], ["c.mp4"])
    result = make_meta(source, tmp_path / "out" / "t.csv", root=tmp_path / "root")
    table = ClipTable.load(tmp_path / "out" / "t.csv", tmp_path / "root")
    assert table.path.to_pylist() == [str(tmp_path / "in" / "sub" / "a.mp4"), "r.mp4", "c.mp4"]
    assert table.missing_files() == []
    assert table.num_frames.tolist() == [4, 5, 6]
    assert "has no column `text`" in result.notes[0]
    assert "1 paths relative to" in result.notes[1]
    make_meta(source, tmp_path / "in" / "u.csv", root=tmp_path / "root")
    assert ClipTable.load(tmp_path / "in" / "u.csv").path.to_pylist() == ["sub/a.mp4", "r.mp4", "c.mp4"]
    make_meta(source, tmp_path / "v.csv", root=tmp_path / "root")
    assert ClipTable.load(tmp_path / "v.csv").path.to_pylist() == ["in/sub/a.mp4", "r.mp4", "c.mp4"]


def test_what_becomes_of_bad_rows(tmp_path: Path) -> None:
    make_clip(tmp_path / "good.mp4", frames=4)
    (tmp_path / "bad.mp4").write_bytes(b"nothing" * 99)
    source = write(tmp_path / "in.csv", ["path", "text"], ["bad.mp4", "1"], ["good.mp4", "2"], ["gone.mp4", "3"])
    output = tmp_path / "out.csv"
    result = make_meta(source, output)
    assert [row["text"] for row in read(output)] == ["2"]
    assert result.bad == [("bad.mp4", "Invalid data found when processing input"), ("gone.mp4", "no such file")]
    kept = make_meta(source, output, on_error="keep")
    assert (kept.rows, kept.bad) == (3, result.bad)
    assert [row["num_frames"] for row in read(output)] == ["", "4", ""]
    before = output.read_bytes()
    make_meta(output, output, on_error="keep")
    assert output.read_bytes() == before
    output.unlink()
    with pytest.raises(DataError) as caught:
        make_meta(source, output, on_error="fail")
    assert caught.value.message.startswith(f"2 of 3 files of `{source}` cannot be used: `bad.mp4`: Invalid data")
    assert not output.exists()


def test_nothing_usable_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", ["path", "text"], ["gone.mp4", "1"], ["away.mp4", "2"])
    for on_error in ("skip", "keep", "fail"):
        with pytest.raises(DataError) as caught:
            make_meta(source, tmp_path / "out.csv", on_error=on_error)
        assert caught.value.exit_code == 3
        assert caught.value.message == (
            f"no file of `{source}` can be used: `gone.mp4`: no such file; `away.mp4`: no such file"
        )
        assert caught.value.hint is not None
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_input_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "bare.csv", ["path", "text"])
    write(tmp_path / "other.csv", ["video", "text"], ["a.mp4", "x"])
    write(tmp_path / "blank.csv", ["path", "text"], ["", "x"])
    messages = {
        "gone.csv": "does not exist",
        "folder": "no video and no still in folder",
        "bare.csv": "a header and no rows",
        "other.csv": r"has no column `path` \(it has: `video`, `text`\)",
        "blank.csv": "1 row has an empty `path`",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=message):
            make_meta(tmp_path / name, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_output_and_options_that_are_not_allowed(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="neither CSV nor parquet"):
        make_meta(folder, tmp_path / "out.json")
    with pytest.raises(UsageError, match="is a folder"):
        make_meta(folder, tmp_path)
    with pytest.raises(UsageError, match="on_error is `ignore`"):
        make_meta(folder, tmp_path / "out.csv", on_error="ignore")
    with pytest.raises(UsageError, match="num_workers is `-1`"):
        make_meta(folder, tmp_path / "out.csv", num_workers=-1)
    with pytest.raises(UsageError, match="time limit is `0` s"):
        make_meta(folder, tmp_path / "out.csv", time_limit_s=0)
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot be made"):
        make_meta(folder, tmp_path / "file" / "out.csv")


def test_a_full_disk_leaves_the_old_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.csv"
    output.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SetupError, match=r"out\.csv` cannot be written: no space left for it"):
        make_meta(folder, output)
    assert output.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_name_that_no_table_can_hold(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    clip = make_clip(tmp_path / "clips" / "good.mp4", frames=4)
    shutil.copy(clip, str(tmp_path / "clips") + "/b\udcffd.mp4")
    result = make_meta(tmp_path / "clips", tmp_path / "out.csv")
    assert result.rows == 1
    assert result.bad == [("clips/b\udcffd.mp4", "its name is not UTF-8, and a table cannot hold it")]
    assert "b\\udcffd" in (tmp_path / "out.bad.csv").read_text(encoding="utf-8")


def test_exact_counts_what_a_damaged_file_still_gives(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4", frames=60, mux_options={"movflags": "faststart"})
    data = bytearray(path.read_bytes())
    data[-1500:-500] = bytes(1000)
    path.write_bytes(data)
    source = write(tmp_path / "in.csv", ["path"], ["a.mp4"])
    make_meta(source, tmp_path / "quick.csv")
    make_meta(source, tmp_path / "exact.csv", exact=True)
    quick, exact = (int(read(tmp_path / f"{name}.csv")[0]["num_frames"]) for name in ("quick", "exact"))
    assert quick == 60
    assert exact < 60
    assert len(read_frames(path, range(exact))) == exact


def test_the_real_clips(tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", ["path", "text"], *([str(path), path.stem] for path in real_clips()))
    make_meta(source, tmp_path / "out.csv", num_workers=2)
    table = ClipTable.load(tmp_path / "out.csv")
    for row, path in enumerate(real_clips()):
        info = probe(path)
        got = (table.num_frames[row], table.height[row], table.width[row], table.fps[row])
        assert got == (info.num_frames, info.height, info.width, info.fps)
    assert np.allclose(table.aspect_ratio, table.height / table.width, rtol=0, atol=0)
