"""The store of cached tensors: what is written comes back, kills leave whole shards, damage is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from osora_cli.data.cache_store import INDEX, Store, StoreWriter, remove_unfinished, tensor_digest
from osora_cli.errors import DataError, SetupError


def read_all(store: Store) -> dict[str, dict[str, torch.Tensor]]:
    return {key: store.read(key) for key in store.entries}


def fill(folder: Path, keys: str = "abcd", rank: int = 0, **options: int) -> dict[str, torch.Tensor]:
    writer = StoreWriter(folder, rank=rank, **options)
    made = {key: torch.full((3, 2), float(ord(key))) for key in keys}
    for key, tensor in made.items():
        writer.add(key, {"latent": tensor, "other": tensor[0].to(torch.bfloat16)}, {"path": f"{key}.mp4", "n": 1})
    writer.flush()
    return made


def test_what_is_written_comes_back_with_its_facts_and_dtypes(tmp_path: Path) -> None:
    made = fill(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    assert sorted(store.entries) == list("abcd")
    assert store.entries["a"].facts == {"path": "a.mp4", "n": 1}
    read = store.read("c")
    assert torch.equal(read["latent"], made["c"])
    assert read["other"].dtype is torch.bfloat16
    assert "e" not in store
    assert not store.damaged


def test_a_folder_that_is_not_there_is_an_empty_store(tmp_path: Path) -> None:
    assert not Store.open(tmp_path / "none").entries


def test_shards_are_written_when_they_are_full(tmp_path: Path) -> None:
    fill(tmp_path, max_bytes=60)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert sorted(Store.open(tmp_path).entries) == list("abcd")


def test_the_index_is_read_and_what_came_later_is_found_beside_it(tmp_path: Path) -> None:
    fill(tmp_path, "ab")
    Store.open(tmp_path).write_index()
    assert (tmp_path / INDEX).is_file()
    fill(tmp_path, "cd", rank=1)
    assert sorted(Store.open(tmp_path).entries) == list("abcd")
    # The index alone knows the first shard now: its header is not read.
    first = next(iter({entry.shard for key, entry in Store.open(tmp_path).entries.items() if key == "a"}))
    size = (tmp_path / first).stat().st_size
    (tmp_path / first).write_bytes(b"\0" * size)
    assert sorted(Store.open(tmp_path).entries) == list("abcd")


def test_an_index_that_is_no_index_is_passed_over(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / INDEX).write_bytes(b"no parquet")
    assert sorted(Store.open(tmp_path).entries) == list("abcd")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zeros"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
    shard.write_bytes({"flip": data, "cut": data[:-3], "empty": b"", "zeros": bytes(len(data))}[damage])
    store = Store.open(tmp_path)
    if damage != "flip":
        assert list(store.damaged) == [shard.name]
        assert not store.entries
        return
    with pytest.raises(DataError, match="is damaged") as caught:
        read_all(store)
    assert str(shard) in caught.value.message
    assert caught.value.hint is not None
    assert "osora data cache" in caught.value.hint


def test_damage_behind_an_index_is_found_when_it_is_read(tmp_path: Path) -> None:
    fill(tmp_path)
    Store.open(tmp_path).write_index()
    (shard,) = tmp_path.glob("*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match="is damaged"):
        Store.open(tmp_path).read("a")


def test_digest_tells_dtype_shape_and_every_bit() -> None:
    value = torch.arange(6, dtype=torch.float32)
    digests = {
        tensor_digest(value),
        tensor_digest(value.reshape(2, 3)),
        tensor_digest(value.to(torch.bfloat16)),
        tensor_digest(value + torch.tensor([0, 0, 0, 0, 0, 1e-6])),
        tensor_digest(value.view(torch.int32)),
    }
    assert len(digests) == 5
    assert tensor_digest(value.reshape(2, 3).t()) == tensor_digest(value.reshape(2, 3).t().contiguous())


def test_unfinished_shards_of_ranks_that_are_no_more_are_removed(tmp_path: Path) -> None:
    for rank in (0, 1, 7):
        (tmp_path / f".writing-{rank:05d}").write_bytes(b"half")
    remove_unfinished(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-00000", ".writing-00001"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SetupError, match="cannot be written"):
        StoreWriter(tmp_path / "store")


def test_a_file_in_the_folders_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        StoreWriter(tmp_path / "store")


_WRITE_ON = """
import sys, torch
from pathlib import Path
from osora_cli.data.cache_store import StoreWriter
writer = StoreWriter(Path(sys.argv[1]), max_bytes=200_000)
for n in range(100_000):
    writer.add(f"{n:032x}", {"latent": torch.full((40_000,), float(n))}, {"n": n})
"""


def test_a_writer_killed_at_any_time_leaves_whole_shards(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _WRITE_ON, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.safetensors"))) < 3 and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.002)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    store = Store.open(tmp_path)
    assert len(store.entries) >= 3
    assert not store.damaged
    for key, entry in store.entries.items():
        assert store.read(key)["latent"].eq(float(entry.facts["n"])).all()
