"""Where `data meta` writes: links, modes, things that are no files; and files that change while they are looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support.clips import make_clip, picture

from osora_cli.app.data.meta import make_meta
from osora_cli.data import prober
from osora_cli.data.meta_journal import Journal, JournalWriter, stamp_of
from osora_cli.data.meta_workers import Look, look_at
from osora_cli.data.prober import Facts
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError, SetupError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stills").mkdir()
    for i in range(3):
        Image.fromarray(picture(i)).save(tmp_path / "stills" / f"{i}.png")
    return tmp_path / "stills"


def test_of_a_link_what_it_leads_to_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    real, link = tmp_path / "shared" / "real.csv", tmp_path / "link.csv"
    link.symlink_to(real)
    for _ in range(2):  # the second time there is a table
        make_meta(folder, link)
        assert link.is_symlink()
        assert len(ClipTable.load(real)) == 3
        assert sorted(path.name for path in real.parent.iterdir()) == ["real.csv"]
    make_meta(link, link)
    assert link.is_symlink()


def test_a_link_into_nowhere_is_made_good_before_files_are_looked_at(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "new" / "folder" / "real.csv")
    make_meta(folder, link)
    assert (tmp_path / "new" / "folder" / "real.csv").is_file()
    link.unlink()
    (tmp_path / "file").touch()
    link.symlink_to(tmp_path / "file" / "real.csv")
    seen: list[int] = []
    with pytest.raises(SetupError, match="cannot be made"):
        make_meta(folder, link, progress=lambda done, total: seen.append(done))
    assert seen == []


def test_a_table_written_over_keeps_its_mode(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.csv"
    make_meta(folder, output)
    output.chmod(0o600)
    make_meta(output, output, exact=True)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def test_an_output_that_is_no_regular_file(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UsageError, match="is no regular file"):
        make_meta(folder, tmp_path / "pipe.csv")
    assert stat.S_ISFIFO((tmp_path / "pipe.csv").stat().st_mode)


@pytest.mark.parametrize("limit", [float("inf"), 1e300])
def test_a_time_limit_without_end(limit: float, folder: Path, tmp_path: Path) -> None:
    assert make_meta(folder, tmp_path / "t.csv", time_limit_s=limit).rows == 3


def test_a_wait_is_made_of_waits_that_the_system_takes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(prober, "_LONGEST_WAIT_S", 0.001)
    with prober.Prober() as looking:
        assert looking.probe(str(folder / "0.png")).height > 0


def test_a_folder_that_cannot_be_listed_is_no_silent_loss(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked").mkdir()
    listed = os.scandir

    # Root may list everything: what another user gets is put in its place.
    def scandir(path: str) -> object:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="locked` cannot be listed: Permission denied"):
        make_meta(folder, tmp_path / "t.csv")


def _changing(file: Path, during: Callable[[], object]) -> type[prober.Prober]:
    """Probes as ever; the first look at `file` is over when `during` has been called."""

    class Changing(prober.Prober):
        calls = 0

        def probe(self, path: str) -> Facts:
            facts = super().probe(path)
            if path == str(file) and not Changing.calls:
                Changing.calls += 1
                during()
            return facts

    return Changing


def test_a_file_that_is_replaced_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make_clip(tmp_path / "a.mp4", frames=4)
    longer = make_clip(tmp_path / "b.mp4", frames=11)
    monkeypatch.setattr("osora_cli.data.meta_workers.Prober", _changing(clip, lambda: longer.replace(clip)))
    with Journal(tmp_path / "t.csv", exact=False) as journal:
        found = look_at([str(clip)], Look(), journal, None)
        assert found[str(clip)].num_frames == 11
        assert journal.read() == found


def test_the_journal_does_not_take_old_facts_for_those_of_a_new_file(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "a.mp4", frames=4)
    with Journal(tmp_path / "t.csv", exact=False) as journal:
        writer = JournalWriter(journal.folder)
        before = stamp_of(str(clip))
        make_clip(clip, frames=11)
        writer.add(str(clip), before, Facts(4, 64, 96, 24.0))
        writer.close()
        assert journal.read() == {}
