from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from osora_cli.checkpoint.headers import HeaderError, build_header, layout_faults, parse_header, read_header


def test_built_header_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    raw, header = build_header([("a", "F32", (2, 3)), ("b", "BF16", (5,)), ("empty", "F32", (0, 4)), ("c", "BOOL", ())])
    assert len(raw) % 8 == 0
    assert raw[8:].startswith(b'{"__metadata__":{"format":"pt"}')
    assert header.end - header.data_start == 24 + 10 + 0 + 1
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw + bytes(header.end - header.data_start))
    loaded = load_file(path)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in loaded.items()} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.bfloat16, (5,)),
        "empty": (torch.float32, (0, 4)),
        "c": (torch.bool, ()),
    }


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4), "h": torch.ones(7, dtype=torch.float16), "n": torch.tensor(5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {e.key: e.shape for e in header.entries} == {"w": (3, 4), "h": (7,), "n": ()}
    assert header.metadata == {"format": "pt"}
    assert layout_faults(header, (tmp_path / "x.safetensors").stat().st_size) == []


def _file(path: Path, table: object, data: int) -> Path:
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("table", "data", "tensor", "what"),
    [
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, 12, "b", "overlaps"),
        ({"a": _entry(0, 8, [2]), "b": _entry(12, 20, [2])}, 20, "b", "gap"),
        ({"a": _entry(0, 8, [3])}, 8, "a", "takes 12"),
        ({"a": _entry(0, 8, [2])}, 4, "a", "is cut"),
        ({"a": _entry(0, 8, [2])}, 9, None, "1 bytes behind"),
    ],
)
def test_layout_faults_name_the_tensor(tmp_path: Path, table: object, data: int, tensor: str | None, what: str) -> None:
    path = _file(tmp_path / "x.safetensors", table, data)
    faults = layout_faults(read_header(path), path.stat().st_size)
    assert any(key == tensor and what in text for key, text in faults), faults


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"\n  <HTML><body>", "HTML"),
        (bytes(4096), "zeros"),
        (b"abc", "out of bounds"),
        (struct.pack("<Q", 1 << 60) + b"{}", "out of bounds"),
        (struct.pack("<Q", 4) + b"nope", "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 4000) + b"[" * 4000, "no JSON"),
    ],
)
def test_what_is_no_shard_is_told_apart(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(HeaderError, match=what):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}',
        '{"a":{"dtype":"F32","shape":[1]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"__metadata__":{"format":3}}',
        '{"a":7}',
    ],
)
def test_broken_entries_are_refused(text: str) -> None:
    with pytest.raises(HeaderError):
        parse_header(struct.pack("<Q", len(text)) + text.encode())
