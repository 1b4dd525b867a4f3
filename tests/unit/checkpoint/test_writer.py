"""The thread writer: bytes, digests, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import wait
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from osora_cli.checkpoint.manifest import DigestRange
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.checkpoint.writer.threads import BLOCK, ThreadWriter, write_range


def test_ranges_of_one_file_written_in_any_order(tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK + 4567)
    cuts = [0, 10, 4096, BLOCK, BLOCK + 1, len(data)]
    file = TargetFile.create("x", tmp_path / "x", len(data))
    assert (tmp_path / "x").stat().st_size == len(data)
    writer = ThreadWriter(3)
    view = memoryview(data)
    futures = [writer.submit(file, a, view[a:b]) for a, b in reversed(list(pairwise(cuts)))]
    writer.drain()
    assert all(future.done() for future in futures)
    file.sync_and_close()
    writer.close()
    assert (tmp_path / "x").read_bytes() == data
    for future in futures:
        got = future.result()
        expected = xxhash.xxh3_128_hexdigest(data[got.offset : got.offset + got.length])
        assert got == DigestRange(got.offset, got.length, expected)


def test_errors_stay_in_the_future_and_name_the_file(tmp_path: Path) -> None:
    good = TargetFile.create("good", tmp_path / "good", 10)
    bad = TargetFile("bad", tmp_path / "bad", os.open(tmp_path / "good", os.O_RDONLY))
    writer = ThreadWriter(1)
    failing = writer.submit(bad, 0, memoryview(b"x"))
    following = writer.submit(good, 0, memoryview(b"y" * 10))
    wait([failing, following])
    error = failing.exception()
    assert isinstance(error, OSError)
    assert error.filename == str(tmp_path / "bad")
    assert following.result().length == 10
    bad.abandon()
    good.sync_and_close()
    writer.close()


def test_files_are_made_new(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        TargetFile.create("x", tmp_path / "x", 10)


def test_a_failing_sync_names_the_file(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    file = TargetFile("x", tmp_path / "x", write)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        file.sync_and_close()
    assert caught.value.filename == str(tmp_path / "x")
    file.abandon()


def test_short_writes_are_resumed_until_the_error_shows(tmp_path: Path) -> None:
    """A real limit on the file's size: the kernel writes what fits, then refuses."""
    code = f"""
import os, resource
from osora_cli.checkpoint.writer.threads import write_range
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
fd = os.open({str(tmp_path / "x")!r}, os.O_WRONLY | os.O_CREAT)
calls = []
pwrite = os.pwrite
def counting(fd, data, offset):
    calls.append(done := pwrite(fd, data, offset))
    return done
os.pwrite = counting
try:
    write_range(fd, 1000, memoryview(bytes(2_000_000)))
except OSError as error:
    print(error.errno, calls)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "27 [1499000]\n"
    assert (tmp_path / "x").stat().st_size == 1_500_000


def test_short_writes_that_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset))
    data = os.urandom(100_003)
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    assert write_range(fd, 7, memoryview(data)).digest == xxhash.xxh3_128_hexdigest(data)
    os.close(fd)
    assert (tmp_path / "x").read_bytes()[7:] == data
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(OSError, match="no progress"):
        write_range(fd, 0, memoryview(b"x"))
