"""Ways to save a training's state, behind one face: torch.save, torch.distributed.checkpoint, TensorNVMe, osora.

Each has `save` (called at an update boundary), `before_update` (ahead of whatever changes the tensors) and `finish`,
which returns once the bytes are on the disk. `durable` is the time from `save` to then, seconds.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.events import SaveEvent
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.writer.tensornvme import load_writer_class
from osora_cli.errors import SetupError
from osora_cli.tensors import TensorShard

State = dict[str, dict[str, torch.Tensor]]  # group -> key -> tensor


class Method:
    """The face. A method that saves in the background keeps `in_flight` true until it is durable."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        self.durable: list[float] = []
        self.number = 0

    @property
    def in_flight(self) -> bool:
        return False

    def save(self) -> None:
        raise NotImplementedError

    def before_update(self) -> None:
        return

    def finish(self) -> None:
        return

    def close(self) -> None:
        """Give buffers back."""


def sync_tree(path: Path) -> None:
    for file in [*path.rglob("*"), path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class TorchSave(Method):
    """torch.save and fsync, while the training waits."""

    def save(self) -> None:
        started = time.perf_counter()
        path = self.folder / f"state-{self.number % 2}.pt"
        self.number += 1
        torch.save(self.state, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        self.durable.append(time.perf_counter() - started)


class Background(Method):
    """Something that a thread waits for, to know when it is durable."""

    _waiter: threading.Thread | None = None
    _error: BaseException | None = None

    @property
    def in_flight(self) -> bool:
        return self._waiter is not None and self._waiter.is_alive()

    def watch(self, wait: Callable[[], object], started: float) -> None:
        def work() -> None:
            try:
                wait()
            except BaseException as error:
                self._error = error
                return
            self.durable.append(time.perf_counter() - started)

        self._waiter = threading.Thread(target=work)
        self._waiter.start()

    def finish(self) -> None:
        if self._waiter is not None:
            self._waiter.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class Dcp(Background):
    """torch.distributed.checkpoint.async_save, by default or with its pinned stager."""

    pinned = False

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29511")
            dist.init_process_group("gloo", rank=0, world_size=1)
        self._group = dist.new_group(backend="gloo")
        self._stager = self._make_stager() if self.pinned else None
        self._staged: Any = None

    def _make_stager(self) -> Any:
        from torch.distributed.checkpoint import staging

        default: Any = getattr(staging, "DefaultStager", None)
        if default is None:
            raise SetupError("this torch has no DefaultStager")
        on_gpu = torch.cuda.is_available()
        return default(
            staging.StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=on_gpu,
                use_non_blocking_copy=on_gpu,
            )
        )

    def save(self) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, async_save

        self.finish()
        started = time.perf_counter()
        target = self.folder / f"dcp-{self.number % 2}"
        self.number += 1
        shutil.rmtree(target, ignore_errors=True)
        writer = FileSystemWriter(target, thread_count=8, sync_files=True)
        more = {"async_stager": self._stager} if self._stager is not None else {}
        done: Any = async_save(self.state, storage_writer=writer, process_group=self._group, **more)
        self._staged = getattr(done, "staging_completion", None)
        upload = getattr(done, "upload_completion", done)
        self.watch(upload.result, started)

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class DcpPinned(Dcp):
    """See `Dcp`."""

    pinned = True


class TensorNvme(Background):
    """AsyncFileWriter as ColossalAI uses it: one file a group, pinned copies, then fsync, which it leaves out."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        self._make = load_writer_class()
        self._pinned = {
            g: {k: torch.empty_like(t, device="cpu", pin_memory=True) for k, t in table.items()}
            for g, table in state.items()
        }
        self._writers: list[Any] = []

    def save(self) -> None:
        self.finish()
        started = time.perf_counter()
        target = self.folder / f"nvme-{self.number % 2}"
        self.number += 1
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        self._writers = []
        for group, table in self.state.items():
            writer = self._make(str(target / group), n_entries=32, backend="pthread", n_tasks=len(table))
            writer.register_h2d(len(table))
            for key, tensor in table.items():
                writer.write_tensor(tensor, self._pinned[group][key])
            self._writers.append(writer)

        def wait() -> None:
            for writer in self._writers:
                writer.synchronize()
            sync_tree(target)

        self.watch(wait, started)

    def before_update(self) -> None:
        for writer in self._writers:
            writer.sync_before_step()

    def close(self) -> None:
        self._writers.clear()
        self._pinned.clear()


class Osora(Method):
    """`--async-io` with threads that write."""

    backend = "threads"

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        self._in_flight = False
        self._store = CheckpointStore(
            folder / "run", async_io=True, backend=self.backend, keep_n_latest=1, on_event=self._on_event
        )
        self._shards = {g: [TensorShard.whole(k, t) for k, t in table.items()] for g, table in state.items()}
        self._store.reserve(self._shards)  # as the trainer does when a run begins

    @property
    def in_flight(self) -> bool:
        if self._in_flight:
            self._store.poll()
        return self._in_flight

    def _on_event(self, event: SaveEvent) -> None:
        if event.kind == "committed":
            self.durable.append(event.seconds)
            self._in_flight = False

    def save(self) -> None:
        self.number += 1
        groups = {"optimizer": [{"lr": 1e-4, "params": []}]}
        counters = Counters(0, self.number, self.number, None, self.number)
        self._in_flight = True
        self._store.save(CheckpointContents(counters, dict(self._shards), groups))

    def before_update(self) -> None:
        self._store.before_update()

    def finish(self) -> None:
        self._store.finish()

    def close(self) -> None:
        self._store.close()


class OsoraNvme(Osora):
    """`--async-io` over TensorNVMe."""

    backend = "tensornvme"


METHODS: dict[str, type[Method]] = {
    "torch.save": TorchSave,
    "DCP async": Dcp,
    "DCP async, pinned": DcpPinned,
    "TensorNVMe": TensorNvme,
    "osora": Osora,
    "osora, tensornvme": OsoraNvme,
}
