"""Exported weights: what other libraries read of them, and what is left when an export goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import contents, save, tensors, whole
from support.opensora import write_async, write_sync
from support.small_disk import small_disk

from osora_cli.app.ckpt.export import export
from osora_cli.checkpoint import export as module
from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.errors import CheckpointError, SetupError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "run", 3)[0]


def equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[k].dtype == wanted[k].dtype and torch.equal(got[k], wanted[k]) for k in wanted
    )


@pytest.mark.parametrize("weights", ["auto", "ema", "master", "model"])
def test_one_file_of_each_kind(folder: Path, tmp_path: Path, weights: Any) -> None:
    """EMA and masters have no buffers: those come from the weights."""
    result = export(folder, tmp_path / "out.safetensors", weights=weights)
    table = tensors(3)
    wanted = {**table["model"], **table["ema" if weights == "auto" else weights]}
    assert equal(load_file(tmp_path / "out.safetensors"), wanted)
    assert result.verdict == "ok"
    assert result.weights == ("ema" if weights == "auto" else weights)
    assert result.bytes == (tmp_path / "out.safetensors").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "run"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_another_dtype_for_floats_alone(
    folder: Path, tmp_path: Path, name: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    export(folder, tmp_path / "out.safetensors", weights="master", dtype=name)
    got = load_file(tmp_path / "out.safetensors")
    assert got["num_batches"].dtype == torch.int64
    wanted = {k: v.to(dtype) for k, v in tensors(3)["master"].items()}
    assert equal({k: got[k] for k in wanted}, wanted)


def test_hugging_faces_layout(folder: Path, tmp_path: Path) -> None:
    result = export(folder, tmp_path / "hf", weights="model", shard_gb=8e-6)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    got: dict[str, torch.Tensor] = {}
    for name in files:
        part = load_file(tmp_path / "hf" / name)
        assert {k for k, v in index["weight_map"].items() if v == name} == set(part)
        got.update(part)
    assert equal(got, tensors(3)["model"])
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in got.values())
    assert [f.path for f in result.files] == [*files, "model.safetensors.index.json"]


def test_one_shard_has_no_index(folder: Path, tmp_path: Path) -> None:
    """As Hugging Face's own writer does it."""
    export(folder, tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("write", [write_async, write_sync])
def test_open_soras_own(tmp_path: Path, write: Any) -> None:
    source = write(tmp_path / "epoch0-global_step7", 7)
    result = export(source, tmp_path / "out.safetensors", weights="ema")
    assert result.verdict == "complete"
    assert "no manifest" in result.notes[0]
    wanted = {k: v.to(torch.bfloat16) for k, v in tensors(7)["ema"].items()}
    assert equal(load_file(tmp_path / "out.safetensors"), wanted)


def test_of_a_run_the_newest_that_verifies(folder: Path, tmp_path: Path) -> None:
    newer = save(tmp_path / "run", 4)[0]
    (newer / "master.safetensors").write_bytes(b"")
    result = export(tmp_path / "run", tmp_path / "out.safetensors")
    assert result.checkpoint == folder
    assert "passed over epoch0-global_step4: damaged" in result.notes[0]


def test_a_damaged_one_only_by_force(folder: Path, tmp_path: Path) -> None:
    path = folder / "optimizer/optimizer-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: optimizer/optimizer-00001") as caught:
        export(folder, tmp_path / "out.safetensors")
    assert "--force" in str(caught.value.hint)
    assert not (tmp_path / "out.safetensors").exists()
    result = export(folder, tmp_path / "out.safetensors", force=True)
    assert "by force" in result.notes[0]
    assert equal(load_file(tmp_path / "out.safetensors"), {**tensors(3)["model"], **tensors(3)["ema"]})


def test_what_cannot_be_read_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    path = folder / "master.safetensors"
    os.truncate(path, path.stat().st_size - 5000)
    for out in ("out.safetensors", "hf"):
        with pytest.raises(CheckpointError, match="ends at byte"):
            export(folder, tmp_path / out, weights="master", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"weights": "best"}, "unknown weights `best`"),
        ({"dtype": "int4"}, "unknown dtype `int4`"),
        ({"shard_gb": 0.0}, "no size of a file"),
        ({"output": "run"}, "exists already"),
        ({"output": "none/out.safetensors"}, "does not exist"),
    ],
)
def test_slips(folder: Path, tmp_path: Path, change: dict[str, Any], what: str) -> None:
    output = tmp_path / change.pop("output", "out.safetensors")
    with pytest.raises(UsageError, match=what):
        export(folder, output, **change)


def test_weights_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no `discriminator`") as caught:
        export(folder, tmp_path / "out.safetensors", weights="discriminator")
    assert caught.value.allowed == "ema, model, master"


@pytest.mark.parametrize("told", [True, False])
def test_a_full_disk(folder: Path, tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the space goes after it was asked for."""
    with small_disk(tmp_path / "disk", 0.02) as disk:
        if not told:
            monkeypatch.setattr(fsio, "free_bytes", lambda path: 1 << 40)
        for out in ("out.safetensors", "hf"):
            with pytest.raises(SetupError, match="no space for the export" if told else "No space left"):
                export(folder, disk / out)
        assert list(disk.iterdir()) == []


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A tensor of 192 MB is never in memory as a whole."""
    made = contents(1, groups={"model": whole({"big": torch.zeros(48 << 20)})})
    made.provenance, made.param_groups = {}, {}
    store = CheckpointStore(tmp_path / "run", async_io=False)
    store.save(made)
    store.close()
    code = (
        "import resource, sys; from osora_cli.app.ckpt.export import export;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "export(sys.argv[1], sys.argv[2], dtype='bf16');"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    out = tmp_path / "out.safetensors"
    argv = [sys.executable, "-c", code, str(tmp_path / "run/epoch0-global_step1"), str(out)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 96, "megabytes"
    assert out.stat().st_size > 96 << 20


@pytest.mark.parametrize("name", ["in.safetensors", "model/in.safetensors", "hf"])
def test_nothing_is_written_into_a_checkpoint(folder: Path, name: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError, match="would no longer verify"):
        export(folder.parent, folder / name)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt"])
def test_a_pickled_file_by_name_is_no_folder(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="pickled file") as caught:
        export(folder, tmp_path / name)
    assert ".safetensors" in str(caught.value.hint)
    assert not (tmp_path / name).exists()
