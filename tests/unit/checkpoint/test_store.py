"""What a save leaves on the disk, and how the store tells its caller."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints
from support.checkpoints import contents, save, tensors, whole

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.events import PHASES, SaveError, SaveEvent
from osora_cli.checkpoint.manifest import DigestRange, parse_manifest
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.checkpoint.writer.base import TargetFile
from osora_cli.checkpoint.writer.threads import ThreadWriter
from osora_cli.errors import UsageError
from osora_cli.tensors import TensorShard


def tree(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


COMMON = {
    "manifest.json",
    "running_states.json",
    "lr_scheduler",
    "sampler",
    "master.safetensors",
    "model/model-00001.safetensors",
    "model/model.safetensors.index.json",
    "optimizer/optimizer-00001.safetensors",
    "optimizer/optimizer.safetensors.index.json",
    "optimizer/pytorch_optim_group.bin",
    "rng/rank-00000.json",
}


@pytest.mark.parametrize("async_io", [True, False])
def test_a_saved_checkpoint_has_the_files_of_the_format(tmp_path: Path, async_io: bool) -> None:
    (folder,) = save(tmp_path, 3, async_io=async_io)
    extra = {"ema.safetensors", "async_file_io.log"} if async_io else {"ema.pt"}
    assert tree(folder) == COMMON | extra
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch0-global_step3", "latest"]
    assert (tmp_path / "latest").read_text() == "epoch0-global_step3\n"
    assert json.loads((folder / "running_states.json").read_text()) == {
        "epoch": 0,
        "step": 6,
        "global_step": 6,
        "batch_size": None,
        "actual_update_step": 3,
    }
    if async_io:
        assert (folder / "async_file_io.log").read_text() == "All tasks are completed\n" * 4
    assert verify(folder).verdict == "ok"


@pytest.mark.parametrize("async_io", [True, False])
def test_other_libraries_read_what_was_saved(tmp_path: Path, async_io: bool) -> None:
    (folder,) = save(tmp_path, 3, async_io=async_io)
    expected = tensors(3)
    model = load_file(folder / "model/model-00001.safetensors")
    assert model.keys() == expected["model"].keys()
    assert all(torch.equal(model[k], v) and model[k].dtype == v.dtype for k, v in expected["model"].items())
    master = load_file(folder / "master.safetensors")
    assert all(torch.equal(master[f"module.{k}"], v) for k, v in expected["master"].items())
    state = load_file(folder / "optimizer/optimizer-00001.safetensors")
    assert all(torch.equal(state[k], v) for k, v in expected["optimizer"].items())
    assert state["state.0.step"].dtype == torch.float32
    assert state["state.0.step"].shape == ()
    if async_io:
        ema = load_file(folder / "ema.safetensors")
    else:
        ema = torch.load(folder / "ema.pt", weights_only=True)
    assert all(torch.equal(ema[k], v) for k, v in expected["ema"].items())
    groups = torch.load(folder / "optimizer/pytorch_optim_group.bin", weights_only=True)
    assert groups == [{"lr": 1e-4 * 3, "betas": (0.9, 0.98), "params": list(range(7))}]
    assert torch.load(folder / "sampler", weights_only=True) == {"seed": 42, "epoch": 0, "position": 24}


def test_wrappers_names_and_memory_formats_do_not_reach_the_file(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    view = torch.randn(10, 6).t()
    shards = [TensorShard.whole("module._orig_mod.a.weight", weight), TensorShard.whole("b", view)]
    store = CheckpointStore(tmp_path, async_io=True)
    store.save(CheckpointContents(Counters(1, 4, 9, 2, 9), {"model": shards}))
    store.finish()
    store.close()
    loaded = load_file(tmp_path / "epoch1-global_step9/model/model-00001.safetensors")
    assert torch.equal(loaded["a.weight"], weight.contiguous())
    assert torch.equal(loaded["b"], view)


def test_parameters_that_ask_for_gradients_are_saved(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 5))
    store = CheckpointStore(tmp_path, async_io=False)
    store.save(CheckpointContents(Counters(0, 1, 1, 1, 1), {"model": [TensorShard.whole("w", parameter)]}))
    store.close()
    loaded = load_file(tmp_path / "epoch0-global_step1/model/model-00001.safetensors")
    assert torch.equal(loaded["w"], parameter.detach())


@pytest.mark.parametrize("async_io", [True, False])
def test_tensors_that_share_their_memory_are_saved_each(tmp_path: Path, async_io: bool) -> None:
    """Tied weights, a part of another tensor, and an average that is the weights themselves."""
    embedding = torch.randn(6, 4)
    state = {"embed.weight": embedding, "head.weight": embedding, "rows": embedding[2:4], "turned": embedding.t()}
    shards = [TensorShard.whole(key, tensor) for key, tensor in state.items()]
    store = CheckpointStore(tmp_path, async_io=async_io)
    store.save(CheckpointContents(Counters(0, 1, 1, 1, 1), {"model": shards, "ema": shards}))
    store.finish()
    store.close()
    folder = tmp_path / "epoch0-global_step1"
    assert verify(folder).verdict == "ok"
    ema = load_file(folder / "ema.safetensors") if async_io else torch.load(folder / "ema.pt", weights_only=True)
    for loaded in (load_file(folder / "model/model-00001.safetensors"), ema):
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


class GatedWriter(ThreadWriter):
    """Holds all writes back until it is opened."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gate = threading.Event()
        self._keeper: list[threading.Thread] = []

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        future: Future[DigestRange] = Future()

        def later() -> None:
            self.gate.wait()
            inner = super(GatedWriter, self).submit(file, offset, buffer)
            inner.add_done_callback(lambda done: future.set_result(done.result()))

        self._keeper.append(threading.Thread(target=later))
        self._keeper[-1].start()
        return future

    def drain(self) -> None:
        for thread in self._keeper:
            thread.join()
        super().drain()


def gated(store: CheckpointStore) -> GatedWriter:
    store._tools.writer.close()
    writer = GatedWriter()
    store._tools.writer = writer
    return writer


def test_tensors_changed_right_after_save_returns_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    """The copy is slow, and every write is held back until the training has overwritten all that it handed over."""
    live = contents(3)
    store = CheckpointStore(
        tmp_path, async_io=True, on_phase=lambda name: time.sleep(0.03) if name == "snapshot" else None
    )
    writer = gated(store)
    store.save(live)
    for shards in live.sharded.values():
        for shard in shards:
            shard.tensor.fill_(99)
    live.small["sampler"]["position"] = -1
    live.param_groups["optimizer"][0]["lr"] = -1.0
    live.rng["torch"][0] = -1
    live.provenance["run_id"] = "other"
    writer.gate.set()
    store.finish()
    store.close()
    folder = tmp_path / "epoch0-global_step3"
    loaded = load_file(folder / "master.safetensors")
    assert all(torch.equal(loaded[f"module.{k}"], v) for k, v in tensors(3)["master"].items())
    assert torch.load(folder / "sampler", weights_only=True)["position"] == 24
    assert torch.load(folder / "optimizer/pytorch_optim_group.bin", weights_only=True)[0]["lr"] == 1e-4 * 3
    assert json.loads((folder / "rng/rank-00000.json").read_text()) == {"torch": [3, 1, 2]}
    assert parse_manifest((folder / "manifest.json").read_bytes()).provenance["run_id"] == "r1"


def test_reused_buffers_hold_the_save_that_they_are_used_for(tmp_path: Path) -> None:
    """The second save finds the first still in flight, waits, and uses the same slabs."""
    store = CheckpointStore(tmp_path, async_io=True)
    writer = gated(store)
    store.save(contents(1))
    pool = store._pool
    threading.Timer(0.3, writer.gate.set).start()
    store.save(contents(2))
    store.finish()
    assert store._pool is pool
    store.close()
    for update in (1, 2):
        assert verify(tmp_path / f"epoch0-global_step{update}").verdict == "ok"
        loaded = load_file(tmp_path / f"epoch0-global_step{update}/ema.safetensors")
        assert all(torch.equal(loaded[k], v) for k, v in tensors(update)["ema"].items())


class SlowWriter(ThreadWriter):
    """Takes its time before it looks at a buffer."""

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        future: Future[DigestRange] = Future()

        def later() -> None:
            time.sleep(0.02)
            super(SlowWriter, self).submit(file, offset, buffer).add_done_callback(
                lambda done: future.set_result(done.result())
            )

        threading.Thread(target=later).start()
        return future


def test_a_slab_is_not_used_again_before_it_is_written(tmp_path: Path) -> None:
    """Two slabs for some thirty pieces: a digest made while writing would agree with the wrong bytes, so compare."""
    save(tmp_path / "reference", 3)
    store = CheckpointStore(tmp_path / "slow", async_io=True, buffer_bytes=32 << 10)
    store._tools.writer.close()
    store._tools.writer = SlowWriter(4)
    store.save(contents(3))
    store.finish()
    store.close()
    for name in ("model/model-00001.safetensors", "optimizer/optimizer-00001.safetensors", "ema.safetensors"):
        a, b = (tmp_path / run / "epoch0-global_step3" / name for run in ("reference", "slow"))
        assert a.read_bytes() == b.read_bytes()


def test_the_wait_for_the_save_before_is_told_as_stall(tmp_path: Path) -> None:
    events: list[SaveEvent] = []
    store = CheckpointStore(tmp_path, async_io=True, on_event=events.append)
    writer = gated(store)
    store.save(contents(1))
    threading.Timer(0.4, writer.gate.set).start()
    store.save(contents(2))
    store.finish()
    store.close()
    committed = [e for e in events if e.kind == "committed"]
    assert [e.counters.actual_update_step for e in committed if e.counters] == [1, 2]
    assert 0.2 < committed[1].stall_seconds < committed[1].seconds
    assert committed[0].bytes == sum(
        p.stat().st_size for p in (tmp_path / "epoch0-global_step1").rglob("*.*") if p
    ) + sum((tmp_path / "epoch0-global_step1" / n).stat().st_size for n in ("lr_scheduler", "sampler"))
    assert committed[0].gb_per_s > 0


def test_a_small_buffer_makes_the_copy_go_in_pieces(tmp_path: Path) -> None:
    """The same files come out, and the pool never grows past the cap."""
    save(tmp_path / "whole", 3)
    store = CheckpointStore(tmp_path / "pieces", async_io=True, buffer_bytes=32 << 10)
    store.save(contents(3))
    store.finish()
    pool = store._pool
    assert pool is not None
    assert pool._made * pool.slab_bytes <= 32 << 10
    store.close()
    a, b = (tmp_path / name / "epoch0-global_step3" for name in ("whole", "pieces"))
    assert tree(a) == tree(b)
    for name in tree(a) - {"manifest.json"}:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    ranges = parse_manifest((b / "manifest.json").read_bytes()).files["optimizer/optimizer-00001.safetensors"].ranges
    assert len(ranges) > 5
    assert verify(b).verdict == "ok"


def test_phases_come_in_the_order_of_the_protocol(tmp_path: Path) -> None:
    seen: list[str] = []
    save(tmp_path, 1, 2, keep_n_latest=1, on_phase=seen.append)
    second = seen[seen.index("plan", 1) :]
    order = [name for n, name in enumerate(second) if name not in second[:n]]
    expected = [name for name in PHASES if name not in ("exchange", "replace")]
    assert order == expected
    assert second.count("create") == second.count("fdatasync") == 4


def test_a_failed_save_is_told_once_and_leaves_the_one_before(tmp_path: Path) -> None:
    events: list[SaveEvent] = []

    def sabotage(name: str) -> None:
        if name == "cover-check" and (tmp_path / "epoch0-global_step1").exists():
            for staging in tmp_path.glob(".staging-*"):
                (staging / "master.safetensors").unlink()

    store = CheckpointStore(tmp_path, async_io=True, on_event=events.append, on_phase=sabotage)
    store.save(contents(1))
    store.finish()
    store.save(contents(2))
    with pytest.raises(SaveError, match=r"checkpoint `epoch0-global_step2` was not saved: No such file"):
        store.finish()
    store.poll()
    assert [e.kind for e in events] == ["submitted", "committed", "submitted", "failed"]
    assert "No such file" in str(events[-1].error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch0-global_step1", "latest"]
    assert verify(tmp_path / "epoch0-global_step1").verdict == "ok"
    shutil.rmtree(tmp_path / "epoch0-global_step1")
    store.save(contents(3))
    store.finish()
    store.close()
    assert verify(tmp_path / "epoch0-global_step3").verdict == "ok"


def test_in_synchronous_mode_the_error_comes_from_save(tmp_path: Path) -> None:
    def sabotage(name: str) -> None:
        if name == "manifest":
            raise OSError(5, "Input/output error")

    store = CheckpointStore(tmp_path, async_io=False, on_phase=sabotage)
    with pytest.raises(SaveError, match="Input/output error") as caught:
        store.save(contents(1))
    assert caught.value.exit_code == 1
    store.poll()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_changed_behind_the_writers_back_is_no_commit(tmp_path: Path) -> None:
    def cut(name: str) -> None:
        if name == "cover-check":
            (staging,) = tmp_path.glob(".staging-*")
            with (staging / "ema.safetensors").open("r+b") as file:
                file.truncate(1000)

    with pytest.raises(SaveError, match=r"`ema.safetensors` was not written whole: the file has 1000 bytes"):
        save(tmp_path, 1, on_phase=cut)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sharded": {"modle": []}}, "no group of tensors named `modle`"),
        ({"small": {"samplr": {}}}, "no small state named `samplr`"),
        ({"param_groups": {}}, "`optimizer` comes without its parameter groups"),
        ({"small": {"sampler": {"path": Path("x")}}}, "`sampler` holds more than plain values"),
        ({"rng": {"x": {1, 2}}}, "no JSON"),
        ({"provenance": {"x": object()}}, "no JSON"),
        ({"provenance": {"promised_parts": ["discriminator"]}}, "promises `discriminator`"),
        ({"sharded": {"model": whole({"c": torch.zeros(2, dtype=torch.complex64)})}}, "complex64"),
        ({"sharded": {"model": whole({"w": torch.zeros(2)}) * 2}}, "two tensors of `model` are named `w`"),
        ({"sharded": {"model": [TensorShard("w", (6,), 0, torch.zeros(3))]}}, "no rank holds"),
    ],
)
def test_contents_that_could_not_be_resumed_from_are_refused(tmp_path: Path, change: dict, what: str) -> None:
    bad = contents(1)
    if "provenance" not in change:
        bad.provenance = {}
    for name, value in change.items():
        setattr(bad, name, value)
    store = CheckpointStore(tmp_path, async_io=True)
    with pytest.raises(SaveError, match="checkpoint `epoch0-global_step1` was not saved") as caught:
        store.save(bad)
    assert what in str(caught.value)
    store.finish()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_it_and_keeps_its_pictures(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 5)
    (folder / "eval").mkdir()
    (folder / "eval/a.png").write_bytes(b"picture")
    before = parse_manifest((folder / "manifest.json").read_bytes())
    save(tmp_path, 5)
    after = parse_manifest((folder / "manifest.json").read_bytes())
    assert (before.sequence, after.sequence) == (1, 2)
    assert (folder / "eval/a.png").read_bytes() == b"picture"
    assert verify(folder).verdict == "ok"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch0-global_step5", "latest"]


def test_replacing_works_where_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osora_cli.checkpoint.fsio.exchange", lambda a, b: False)
    (folder,) = save(tmp_path, 5)
    save(tmp_path, 5)
    assert parse_manifest((folder / "manifest.json").read_bytes()).sequence == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch0-global_step5", "latest"]


def test_an_optimizer_behind_the_run_by_right_verifies(tmp_path: Path) -> None:
    """Skipped updates: the counters go on, the optimizer's step does not."""
    late = contents(7)
    for shard in late.sharded["optimizer"]:
        if shard.key.endswith("step"):
            shard.tensor.fill_(5)
    store = CheckpointStore(tmp_path, async_io=True)
    store.save(late)
    store.finish()
    store.close()
    report = verify(tmp_path / "epoch0-global_step7")
    assert report.verdict == "ok"
    assert report.manifest is not None
    assert report.manifest.optimizer_lag == {"optimizer": 2}


def test_an_optimizer_without_state_and_a_discriminator(tmp_path: Path) -> None:
    state = contents(1)
    state.sharded["discriminator"] = whole({"d": torch.ones(3)})
    state.sharded["disc_optimizer"] = []
    state.param_groups["disc_optimizer"] = [{"lr": 1.0, "params": [0]}]
    state.small["disc_lr_scheduler"] = {"last_epoch": 0}
    store = CheckpointStore(tmp_path, async_io=True)
    store.save(state)
    store.finish()
    store.close()
    folder = tmp_path / "epoch0-global_step1"
    assert {"discriminator/model-00001.safetensors", "disc_optimizer/optimizer.safetensors.index.json"} <= tree(folder)
    assert verify(folder).verdict == "ok"


def test_many_shards(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 2, shard_limit=12_000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    assert len(list((folder / "optimizer").glob("*.safetensors"))) > 1
    assert verify(folder).verdict == "ok"
    lines = (folder / "async_file_io.log").read_text().splitlines()
    assert len(lines) == len(list(folder.rglob("*.safetensors")))


def test_unknown_backend() -> None:
    with pytest.raises(UsageError, match="unknown async_io_backend `nvme`"):
        CheckpointStore(Path("x"), async_io=True, backend="nvme")


def test_checkpoints_helper_is_what_it_says() -> None:
    assert torch.equal(checkpoints.weights(3)["mid.weight"], checkpoints.weights(3)["mid.weight"])
    assert not torch.equal(checkpoints.weights(3)["mid.weight"], checkpoints.weights(4)["mid.weight"])
