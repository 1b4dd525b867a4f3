"""The tensornvme writer against a stand-in that behaves as TensorNVMe's source says; the real one where it is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.checkpoints import save, tensors, whole

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.events import SaveError
from osora_cli.checkpoint.manifest import parse_manifest
from osora_cli.checkpoint.resolve import newest_verified
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.checkpoint.writer import tensornvme
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.checkpoint.writer.tensornvme import TensorNvmeWriter, load_writer_class
from osora_cli.errors import SetupError

STANDIN = Path(__file__).parents[2] / "support/tensornvme_standin"


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The writer sets the environment of the process; it is as before afterwards."""
    for name in ("TENSORNVME_DEBUG", "TENSORNVME_DEBUG_LOG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield monkeypatch
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensornvme"]:
        del sys.modules[name]


@pytest.fixture
def standin(clean_env: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, importable as `tensornvme.async_file_io`, on a machine that says it has CUDA."""
    clean_env.syspath_prepend(str(STANDIN))
    clean_env.setattr(torch.cuda, "is_available", lambda: True)
    import importlib

    return importlib.import_module("tensornvme.async_file_io")


def test_files_are_those_of_the_other_writer(standin: ModuleType, tmp_path: Path) -> None:
    (ours,) = save(tmp_path / "a", 3, backend="threads")
    (theirs,) = save(tmp_path / "b", 3, backend="tensornvme", buffer_bytes=64 << 10)
    assert verify(theirs).verdict == "ok"
    manifest = parse_manifest((theirs / "manifest.json").read_bytes())
    assert manifest.writer == "tensornvme"
    files = sorted(p.relative_to(ours) for p in ours.rglob("*") if p.suffix == ".safetensors")
    assert len(files) == 4
    for file in files:
        assert (theirs / file).read_bytes() == (ours / file).read_bytes()
    assert standin.CALLS


def test_its_log_is_in_the_checkpoint_with_a_line_for_each_file_on_top(standin: ModuleType, tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3, backend="tensornvme")
    lines = (folder / "async_file_io.log").read_text().splitlines()
    assert set(lines) == {"All tasks are completed"}
    assert len(lines) == len(standin.MADE) + 4
    assert os.environ["TENSORNVME_DEBUG"] == "1"
    assert Path(os.environ["TENSORNVME_DEBUG_LOG"]).name == "async_file_io.log"
    assert ".staging" in os.environ["TENSORNVME_DEBUG_LOG"], "the log of the folder that was written to"


def test_a_synchronous_save_has_no_log(standin: ModuleType, tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3, backend="tensornvme", async_io=False)
    assert [p.name for p in folder.iterdir() if "log" in p.name] == []
    assert verify(folder).verdict == "ok"


def test_auto_takes_it_where_it_can_run(standin: ModuleType, tmp_path: Path) -> None:
    for backend, name in (("auto", "tensornvme"), ("threads", "threads")):
        store = CheckpointStore(tmp_path, async_io=True, backend=backend)
        assert store.writer_name == name
        store.close()


def _short(fd: int, data: bytes, offset: int) -> int:
    return os.pwrite(fd, data[: len(data) // 2], offset)


def _fails(fd: int, data: bytes, offset: int) -> int:
    raise OSError(28, "No space left on device")


def _flips(fd: int, data: bytes, offset: int) -> int:
    return os.pwrite(fd, bytes([data[0] ^ 1]) + data[1:], offset)


@pytest.mark.parametrize("fault", [_short, _fails, _flips])
@pytest.mark.parametrize("async_io", [True, False])
def test_what_it_keeps_silent_is_no_checkpoint(
    standin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, async_io: bool
) -> None:
    save(tmp_path, 1, backend="tensornvme", async_io=async_io)
    monkeypatch.setattr(standin, "FAULT", fault)
    with pytest.raises(SaveError, match="are not what was written"):
        save(tmp_path, 2, backend="tensornvme", async_io=async_io)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch0-global_step1", "latest"]
    resolved = newest_verified(tmp_path)
    assert resolved is not None
    assert resolved.path.name == "epoch0-global_step1"


def _write(writer: TensorNvmeWriter, folder: Path, size: int) -> tuple[bytes, Any]:
    data = bytearray(os.urandom(size))
    file = TargetFile.create("x", folder / "x", size + 7)
    writer.begin(folder / "log")
    future = writer.submit(file, 7, memoryview(data))
    writer.drain()
    file.sync_and_close()
    return bytes(data), future


def test_what_is_too_long_for_one_call_is_split(standin: ModuleType, tmp_path: Path) -> None:
    writer = TensorNvmeWriter(max_write=1000)
    data, future = _write(writer, tmp_path, 2500)
    writer.close()
    assert [(size, at) for _, size, at in standin.CALLS[-3:]] == [(1000, 7), (1000, 1007), (500, 2007)]
    assert (tmp_path / "x").read_bytes() == bytes(7) + data
    assert future.result().length == 2500
    assert (tmp_path / "log").read_text() == "All tasks are completed\n", "the number of tasks was announced"
    assert tensornvme.MAX_WRITE == 2_147_479_552


def test_without_a_log_synchronize_does_the_waiting(
    standin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that has no room for the line, or with another backend by TENSORNVME_BACKEND."""
    monkeypatch.setattr(tensornvme, "_QUIET_S", 0.05)
    writer = TensorNvmeWriter()
    (tmp_path / "log").mkdir()  # no line can be written
    data, future = _write(writer, tmp_path, 5000)
    writer.close()
    assert future.result().length == 5000
    assert (tmp_path / "x").read_bytes()[7:] == data


def test_a_file_that_cannot_be_opened_is_named(standin: ModuleType, tmp_path: Path) -> None:
    writer = TensorNvmeWriter()
    future = writer.submit(TargetFile("x", tmp_path / "none/x", -1), 0, memoryview(bytearray(8)))
    writer.drain()
    writer.close()
    with pytest.raises(FileNotFoundError) as caught:
        future.result()
    assert caught.value.filename == str(tmp_path / "none/x")


def test_writers_are_let_go_so_that_their_files_close(standin: ModuleType, tmp_path: Path) -> None:
    import gc
    import weakref

    writer = TensorNvmeWriter()
    _write(writer, tmp_path, 100)
    made = [weakref.ref(w) for w in standin.MADE]
    standin.MADE.clear()
    writer.close()
    gc.collect()
    assert [ref() for ref in made if ref() is not None] == []


@pytest.mark.parametrize(
    ("files", "cuda", "what"),
    [
        ({}, True, "is not installed"),
        ({"__init__.py": ""}, True, "has no `tensornvme.async_file_io`, like release 0.1.0 at PyPI"),
        ({"__init__.py": "raise ImportError('libaio.so.1 is missing')"}, True, "libaio.so.1 is missing"),
        ({"__init__.py": "raise RuntimeError('undefined symbol')"}, True, "undefined symbol"),
        ({"__init__.py": "", "async_file_io.py": "import tensornvme._C"}, True, "cannot be imported"),
        ({"__init__.py": "", "async_file_io.py": "AsyncFileWriter = None"}, False, "needs CUDA"),
    ],
)
def test_refusals_say_why_and_where_to_get_it(
    clean_env: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cuda: bool, what: str
) -> None:
    """At the start, never at the first save; `auto` goes on with threads."""
    package = tmp_path / "lib/tensornvme"
    package.mkdir(parents=True)
    for name, text in files.items():
        (package / name).write_text(text)
    if files:
        clean_env.syspath_prepend(str(tmp_path / "lib"))
    elif tensornvme_is_here():
        pytest.skip("NOT TESTED: TensorNVMe is installed here")
    clean_env.setattr(torch.cuda, "is_available", lambda: cuda)
    with pytest.raises(SetupError) as caught:
        CheckpointStore(tmp_path / "run", async_io=True, backend="tensornvme")
    assert caught.value.exit_code == 5
    assert what in caught.value.message
    assert "github.com/hpcaitech/TensorNVMe" in str(caught.value.hint)
    assert "CUDA headers" in str(caught.value.hint)
    assert "threads" in str(caught.value.hint)
    store = CheckpointStore(tmp_path / "run", async_io=True)
    assert store.writer_name == "threads"
    store.close()


def tensornvme_is_here() -> bool:
    try:
        load_writer_class()
    except SetupError as error:
        return "is not installed" not in error.message
    return True


@pytest.mark.gpu
def test_the_real_one(clean_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a GPU's tensors, twice into the same buffers, with lines of its own in the log."""
    pytest.importorskip("tensornvme.async_file_io", exc_type=ImportError)
    store = CheckpointStore(tmp_path, async_io=True, backend="tensornvme", buffer_bytes=256 << 10)
    for update in (3, 4):
        groups = {
            name: whole({key: tensor.cuda() for key, tensor in table.items()})
            for name, table in tensors(update).items()
        }
        store.save(
            CheckpointContents(Counters(0, update, update, None, update), groups, {"optimizer": [{"params": []}]})
        )
        store.before_update()
        for table in groups.values():
            for shard in table:
                shard.tensor.zero_()
    store.finish()
    store.close()
    for update in (3, 4):
        folder = tmp_path / f"epoch0-global_step{update}"
        assert verify(folder).verdict == "ok"
        manifest = parse_manifest((folder / "manifest.json").read_bytes())
        assert manifest.writer == "tensornvme"
        lines = (folder / "async_file_io.log").read_text().splitlines()
        assert len(lines) > 4, "its own lines, and one for each file"
        (reference,) = save(tmp_path / "cpu", update, backend="threads")
        for file in reference.rglob("*.safetensors"):
            assert (folder / file.relative_to(reference)).read_bytes() == file.read_bytes()


@pytest.mark.gpu
def test_the_real_one_on_a_full_disk(clean_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says nothing of ENOSPC; the digests that are read back do."""
    from support.small_disk import small_disk

    pytest.importorskip("tensornvme.async_file_io", exc_type=ImportError)
    with small_disk(tmp_path / "disk", 1) as disk:
        writer = TensorNvmeWriter()
        file = TargetFile.open("x", disk / "x") if (disk / "x").exists() else TargetFile.create("x", disk / "x", 0)
        writer.begin(tmp_path / "log")
        future = writer.submit(file, 0, memoryview(bytearray(os.urandom(4 << 20))))
        writer.drain()
        writer.close()
        file.abandon()
        with pytest.raises(OSError, match="are not what was written"):
            future.result()
