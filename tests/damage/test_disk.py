"""Disks that are full or read-only, for real: small tmpfs mounts (these need root)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import contents, save

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.events import SaveError, SaveEvent
from osora_cli.checkpoint.resolve import newest_verified
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.errors import SetupError

SIZE = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(mount)]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("NOT TESTED: there is no mount command, so no full disk")
    if made.returncode:
        pytest.skip(f"NOT TESTED: no small tmpfs can be mounted here ({made.stderr.strip()})")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(disk: Path, leave: int) -> None:
    """A file that leaves so many bytes."""
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, fsio.free_bytes(disk) - leave)


def save_and_finish(store: CheckpointStore, update: int) -> None:
    store.save(contents(update))
    store.finish()


def check_untouched(run: Path) -> None:
    assert sorted(p.name for p in run.iterdir()) == ["epoch0-global_step1", "latest"]
    resolved = newest_verified(run)
    assert resolved is not None
    assert resolved.path.name == "epoch0-global_step1"
    assert verify(resolved.path).verdict == "ok"


@pytest.mark.parametrize("async_io", [True, False])
def test_too_little_space_is_told_before_anything_is_written(disk: Path, async_io: bool) -> None:
    run = disk / "run"
    save(run, 1, async_io=async_io)
    fill(disk, 300_000)
    store = CheckpointStore(run, async_io=async_io)
    with pytest.raises(
        SetupError, match=r"no space for a checkpoint: it takes 1\.\d MB, .* has 2\d\d\.\d kB left"
    ) as e:
        store.save(contents(2))
    assert e.value.exit_code == 5
    assert e.value.hint is not None
    check_untouched(run)
    (disk / "filler").unlink()
    store.save(contents(2))
    store.finish()
    store.close()
    assert verify(run / "epoch0-global_step2").verdict == "ok"


@pytest.mark.parametrize("async_io", [True, False])
@pytest.mark.parametrize(
    ("allocate", "share"),
    [(True, 0.5), (False, 0.5), (False, 0.05), (False, 0.95)],
    ids=["no blocks to be had", "full in the middle of the tensors", "full at once", "full at the small files"],
)
def test_a_disk_that_is_full_all_the_same(
    disk: Path, monkeypatch: pytest.MonkeyPatch, async_io: bool, allocate: bool, share: float
) -> None:
    """Another process took the space after the check; with and without blocks that are reserved beforehand.

    `share` of what the checkpoint takes is left.
    """
    run = disk / "run"
    (first,) = save(run, 1, async_io=async_io)
    fill(disk, int(share * sum(p.stat().st_blocks * 512 for p in first.rglob("*") if p.is_file())))
    monkeypatch.setattr(fsio, "free_bytes", lambda folder: 1 << 40)
    if not allocate:
        monkeypatch.setattr(fsio, "preallocate", os.ftruncate)
    events: list[SaveEvent] = []
    store = CheckpointStore(run, async_io=async_io, on_event=events.append)
    with pytest.raises(SaveError) as caught:
        save_and_finish(store, 2)
    store.close()
    assert "`epoch0-global_step2` was not saved: No space left on device" in str(caught.value)
    assert caught.value.hint is not None
    assert "keep-n-latest" in caught.value.hint
    assert [event.kind for event in events] == ["submitted", "failed"]
    check_untouched(run)


def test_a_disk_that_is_full_in_the_middle_of_the_ema(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes `ema.pt` itself, and would only complain about positions."""
    run = disk / "run"
    (first,) = save(run, 1, async_io=False)
    tensors = sum(p.stat().st_blocks * 512 for p in first.rglob("*.safetensors"))
    fill(disk, tensors + (first / "ema.pt").stat().st_size // 2)
    monkeypatch.setattr(fsio, "free_bytes", lambda folder: 1 << 40)
    store = CheckpointStore(run, async_io=False)
    with pytest.raises(SaveError, match=r"No space left on device \(`ema\.pt`\)"):
        store.save(contents(2))
    store.close()
    check_untouched(run)


def test_a_read_only_disk(disk: Path) -> None:
    run = disk / "run"
    save(run, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for target in (run, disk / "other"):
        store = CheckpointStore(target, async_io=True)
        with pytest.raises(SetupError, match="Read-only file system") as caught:
            store.save(contents(2))
        store.close()
        assert caught.value.exit_code == 5
        assert caught.value.hint is not None
    assert verify(run / "epoch0-global_step1").verdict == "ok"


def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("NOT TESTED: root may write everywhere")
    tmp_path.chmod(0o555)
    store = CheckpointStore(tmp_path / "run", async_io=True)
    with pytest.raises(SetupError, match="Permission denied"):
        store.save(contents(1))
    store.close()
