"""The staging buffers, and on a GPU the order of copy and update."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import contents, save

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.checkpoint.staging import SlabPool, byte_view
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.tensors import TensorShard


def test_slabs_are_made_up_to_the_limit_and_used_again() -> None:
    pool = SlabPool(1024, 3000, pinned=False)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert pool.take() is None
    threading.Timer(0.05, pool.release, [first]).start()
    assert pool.wait() is first
    pool.release(second)
    assert pool.take() is second


def test_one_slab_is_always_to_be_had() -> None:
    pool = SlabPool(1024, 10, pinned=False)
    assert pool.take() is not None
    assert pool.take() is None


def test_less_memory_than_allowed_makes_pieces_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool(1024, 1 << 20, pinned=False)
    only = pool.take()
    assert only is not None

    def none_left(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", none_left)
    assert pool.take() is None
    pool.release(only)
    assert pool.take() is only
    with pytest.raises(RuntimeError, match="out of memory"):
        SlabPool(1024, 1 << 20, pinned=False).take()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_bytes_in_row_major_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert torch.equal(byte_view(tensor).view(dtype).reshape(2, 3, 4).float(), tensor.float())
    turned = tensor.transpose(0, 2)
    assert torch.equal(byte_view(turned).view(dtype).reshape(4, 3, 2).float(), turned.float())
    assert byte_view(tensor[0, 0, 0]).numel() == tensor.element_size()
    assert byte_view(tensor).data_ptr() == tensor.data_ptr(), "no copy where none is needed"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("buffer_bytes", [16 << 30, 64 << 20], ids=["whole", "in pieces"])
def test_an_update_behind_before_update_does_not_reach_the_snapshot(tmp_path: Path, buffer_bytes: int) -> None:
    """The copy is held up on purpose: the compute stream is busy when the save is asked for."""
    events: list[SaveEvent] = []
    store = CheckpointStore(tmp_path, async_io=True, buffer_bytes=buffer_bytes, on_event=events.append)
    weight = torch.full((64, 1 << 20), 1.0, device="cuda")
    running = torch.zeros(128, device="cuda")
    turned = torch.randn(8, 16, 3, 3, 3, device="cuda").to(memory_format=torch.channels_last_3d)
    step = torch.tensor(0.0)
    for update in (1, 2):
        torch.cuda._sleep(200_000_000)
        weight.fill_(float(update))
        running.fill_(float(update))
        step.fill_(update)
        expected = turned.clone()
        shards = [TensorShard.whole(k, t) for k, t in (("w", weight), ("running", running), ("turned", turned))]
        state = CheckpointContents(Counters(0, update, update, 1, update), {"model": shards})
        store.save(state)
        running.add_(100)  # the next forward pass
        store.before_update()
        weight.fill_(-1.0)
        turned.mul_(2)
        store.finish()
        loaded = load_file(tmp_path / f"epoch0-global_step{update}/model/model-00001.safetensors")
        assert torch.all(loaded["w"] == update)
        assert torch.all(loaded["running"] == update)
        assert torch.equal(loaded["turned"], expected.cpu().contiguous())
        assert verify(tmp_path / f"epoch0-global_step{update}").verdict == "ok"
    store.close()
    assert [event.kind for event in events] == ["submitted", "committed"] * 2


def test_buffers_can_be_made_ahead() -> None:
    """As many as the bytes take, never more than allowed, and used like the others."""
    pool = SlabPool(4096, 10 * 4096, pinned=False)
    pool.reserve(3 * 4096 + 1)
    assert pool._made == len(pool._free) == 4
    taken = [pool.take() for _ in range(10)]
    assert all(taken)
    assert pool.take() is None
    small = SlabPool(4096, 2 * 4096, pinned=False)
    small.reserve(1 << 30)
    assert small._made == 2


def test_on_the_host_nothing_is_made_ahead(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, async_io=True)
    store.reserve(contents(1).sharded)
    assert store._pool is None
    store.close()


@pytest.mark.gpu
@needs_gpu
def test_the_first_save_uses_the_buffers_made_ahead(tmp_path: Path) -> None:
    shards = [TensorShard.whole("w", torch.ones(100 << 20, device="cuda"))]
    store = CheckpointStore(tmp_path, async_io=True)
    store.reserve({"model": shards})
    pool = store._pool
    assert pool is not None
    store.save(CheckpointContents(Counters(0, 1, 1, 1, 1), {"model": shards}))
    store.before_update()
    store.finish()
    assert store._pool is pool
    store.close()
    assert verify(tmp_path / "epoch0-global_step1").verdict == "ok"


@pytest.mark.gpu
@needs_gpu
def test_files_from_a_gpu_are_those_from_the_host(tmp_path: Path) -> None:
    (reference,) = save(tmp_path / "host", 3)
    state = contents(3)
    state.sharded = {
        group: [TensorShard(s.key, s.shape, s.start, s.tensor.cuda()) for s in shards]
        for group, shards in state.sharded.items()
    }
    store = CheckpointStore(tmp_path / "gpu", async_io=True)
    store.save(state)
    store.before_update()
    store.finish()
    store.close()
    for path in reference.rglob("*.safetensors"):
        name = path.relative_to(reference)
        assert (tmp_path / "gpu/epoch0-global_step3" / name).read_bytes() == path.read_bytes()
