"""That the tests of torn and stale snapshots can tell: with a guard taken out, what they look for does happen."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import contents, save, tensors

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.events import SaveError
from osora_cli.checkpoint.manifest import DigestRange
from osora_cli.checkpoint.save_job import SaveJob
from osora_cli.checkpoint.staging import CudaCopier
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.tensor_files import TensorFiles
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.checkpoint.writer.threads import ThreadWriter
from osora_cli.tensors import TensorShard


def _masters_after_a_change(run: Path) -> bool:
    """Save slowly, change everything as soon as save() returns; whether the masters are those of the save."""
    store = CheckpointStore(run, async_io=True, on_phase=lambda name: time.sleep(0.05) if name == "snapshot" else None)
    live = contents(3)
    store.save(live)
    for shards in live.sharded.values():
        for shard in shards:
            shard.tensor.fill_(99)
    store.finish()
    store.close()
    loaded = load_file(run / "epoch0-global_step3/master.safetensors")
    return all(torch.equal(loaded[f"module.{k}"], v) for k, v in tensors(3)["master"].items())


def test_without_the_wait_for_the_copy_a_snapshot_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _masters_after_a_change(tmp_path / "guarded")
    monkeypatch.setattr(SaveJob, "has_host_tensors", property(lambda self: False))
    assert not _masters_after_a_change(tmp_path / "bare")


class _LateWriter(ThreadWriter):
    """Looks at no buffer before it holds seven of them, or drain() asks for it."""

    def __init__(self) -> None:
        super().__init__(1)
        self._held: list[tuple[TargetFile, int, memoryview, Future[DigestRange]]] = []

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        self._held.append((file, offset, buffer, Future()))
        future = self._held[-1][-1]
        if len(self._held) > 6:
            self._go()
        return future

    def drain(self) -> None:
        self._go()
        super().drain()

    def _go(self) -> None:
        held, self._held = self._held, []
        for file, offset, buffer, future in held:
            super().submit(file, offset, buffer).add_done_callback(lambda done, f=future: f.set_result(done.result()))


def _same_as_reference(run: Path, reference: Path) -> bool:
    store = CheckpointStore(run, async_io=True, buffer_bytes=32 << 10)
    store._tools.writer.close()
    store._tools.writer = _LateWriter()
    store._range_limit = 4096
    try:
        for update in (2, 3):
            store.save(contents(update))
        store.finish()
    except SaveError:  # a step that is no number of steps any more is noticed even without a digest
        return False
    finally:
        store.close()
    name = "epoch0-global_step3/optimizer/optimizer-00001.safetensors"
    return (run / name).read_bytes() == (reference / name).read_bytes()


def test_buffers_that_are_used_again_too_early_store_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "reference", 3)
    assert _same_as_reference(tmp_path / "guarded", tmp_path / "reference")
    hand_over = TensorFiles._hand_over

    def too_early(self: TensorFiles, staged: Any, writes: Any) -> None:
        hand_over(self, staged, writes)
        self._pool.release(staged.slab)

    monkeypatch.setattr(TensorFiles, "_hand_over", too_early)
    assert not _same_as_reference(tmp_path / "bare", tmp_path / "reference")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_without_the_event_before_the_update_a_gpus_snapshot_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def masters(run: Path) -> bool:
        store = CheckpointStore(run, async_io=True)
        weight = torch.full((512, 1 << 20), 1.0, device="cuda")
        for update in (1, 2):
            weight.fill_(float(update))
            shards = [TensorShard.whole("w", weight)]
            store.save(CheckpointContents(Counters(0, update, update, 1, update), {"model": shards}))
            store.before_update()
            weight.fill_(-1.0)
            store.finish()
        store.close()
        loaded = load_file(run / "epoch0-global_step2/model/model-00001.safetensors")
        return bool(torch.all(loaded["w"] == 2.0))

    copy = CudaCopier.copy

    def late(self: CudaCopier, target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms, so that the update comes before the last copies
        copy(self, target, source)

    monkeypatch.setattr(CudaCopier, "copy", late)
    assert masters(tmp_path / "guarded")
    monkeypatch.setattr(CudaCopier, "hold_update", lambda self: None)
    assert not masters(tmp_path / "bare")
