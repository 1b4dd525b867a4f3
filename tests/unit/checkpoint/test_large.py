"""A tensor longer than one write of the kernel's takes (2,147,479,552 bytes)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.tensors import TensorShard


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_more_than_two_gib_in_one_tensor(tmp_path: Path) -> None:
    count = (1 << 31) + 12_345
    tensor = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8).repeat(count // (1 << 20) + 1)[:count]
    store = CheckpointStore(tmp_path, async_io=True, buffer_bytes=256 << 20)
    store.save(CheckpointContents(Counters(0, 1, 1, None, 1), {"model": [TensorShard.whole("w", tensor)]}))
    store.finish()
    store.close()
    folder = tmp_path / "epoch0-global_step1"
    assert verify(folder).verdict == "ok"
    with safe_open(folder / "model/model-00001.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("w")[-20_000:], tensor[-20_000:])
    reader = CheckpointReader(folder)
    assert torch.equal(reader.read_flat("model", "w", (1 << 31) - 100, 200), tensor[(1 << 31) - 100 :][:200])
    got = torch.zeros_like(tensor)
    reader.read_into("model", [TensorShard.whole("w", got)])
    assert torch.equal(got, tensor)
