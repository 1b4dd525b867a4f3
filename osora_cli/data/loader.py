"""Batches of clips from a table, decoded ahead by worker processes."""

from __future__ import annotations

import atexit
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from osora_cli.data.clip_reader import BatchResult, BatchTask, ClipSource, ReadOptions, StoredNames, read_batch
from osora_cli.data.draws import draw_rng
from osora_cli.data.failures import FailureLimit
from osora_cli.data.plan import Batch, EpochPlan
from osora_cli.data.stored_text import StoredColumn
from osora_cli.data.table import ClipTable
from osora_cli.data.worker import start_worker
from osora_cli.errors import RunError

# Clips at hand for those that fail, beyond as many as a batch has.
_SPARES = 8
# How often workers are looked after while nothing comes.
_POLL_S = 5.0
_SHARED_MEMORY = "/dev/shm"
_PRELOAD = ["osora_cli.data.worker", "osora_cli.data.loader"]


@dataclass(frozen=True)
class ClipBatch:
    """A batch as delivered, on the CPU.

    Attributes:
        video: uint8 [B, 3, T, H, W], RGB, contiguous; `transforms.normalize` takes it to [-1, 1].
        rows: of the table; a replacement's own row where a clip was replaced.
        positions: in the epoch's order, as planned.
        texts: captions with their suffix.
        fps: rate each clip is used at, frames a second; 0 for stills.
        motion_scores: the table's `score_vmafmotion` of each clip; NaN where there is none.
        replaced: (row, path and reason) of clips that could not be read, each replaced by another of its bucket.
        shortened: (row, path and reason) of clips whose file holds fewer frames than the table says, but enough.
        wait_s: seconds the caller waited for this batch.
    """

    video: Tensor
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    texts: tuple[str, ...]
    fps: tuple[float, ...]
    motion_scores: tuple[float, ...]
    replaced: tuple[tuple[int, str], ...]
    shortened: tuple[tuple[int, str], ...]
    wait_s: float


class _WorkerTraceback(Exception):
    """What went wrong in a worker, as text: the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Reader(Dataset[BatchResult | None]):
    """Turns tasks into batches. All that a worker gets."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def __getitem__(self, task: BatchTask | None) -> BatchResult | None:
        return None if task is None else read_batch(task, self._options)


class _Tasks(Sampler[BatchTask | None]):
    """Tasks of one pass after the other, without end: None where there is nothing to do at the moment.

    So one set of workers serves all passes: each step asks for one task ahead, and what is left of a pass that was
    broken off, or of a pause, comes back under another pass's number or as None.
    """

    def __init__(self) -> None:
        self.current: Iterator[BatchTask] = iter(())

    def __iter__(self) -> Iterator[BatchTask | None]:
        while True:
            yield next(self.current, None)


@contextmanager
def _more_workers_than_cores() -> Iterator[None]:
    """Without DataLoader's warning: it is the caller's choice, as decoding also waits for storage."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _as_it_is(result: Any) -> Any:
    return result


class ClipLoader:
    """Decodes batches of a table, with workers that stay for all passes.

    The pixels depend on table, seed, epoch and positions only, not on the number of workers. Workers come from a fork
    server, a process of its own, and so share no thread, lock or CUDA state with this one; they leave SIGINT and
    SIGTERM to it and end when it does.

    Args:
        table: the clips.
        seed: the run's; every draw for a clip is keyed by (seed, epoch, position).
        fps_max: largest rate wanted, frames a second; None: no limit.
        num_workers: processes that decode; 0: this one.
        prefetch_factor: batches each worker holds ready.
        rand_sample_interval: draw the frame interval from 1 to this; None: by the rate.
        max_bad_fraction: share of clips that may fail before a pass stops, see `FailureLimit`.
        motion_score: put the table's motion score into captions.
        pin_memory: page-locked batches; without CUDA it does nothing.
        timeout_s: seconds without a batch after which the workers are given up.
    """

    def __init__(
        self,
        table: ClipTable,
        *,
        seed: int,
        fps_max: float | None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        rand_sample_interval: int | None = None,
        max_bad_fraction: float = 0.05,
        motion_score: bool = False,
        pin_memory: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self._table, self._seed = table, seed
        self._max_bad_fraction, self._timeout_s = max_bad_fraction, timeout_s
        self._num_workers, self._ahead = num_workers, max(1, num_workers * prefetch_factor)
        self._tasks = _Tasks()
        self._results: Iterator[BatchResult | None] | None = None
        self._workers: list[BaseProcess] = []
        self._pass, self._closed = 0, False
        self._at_exit = partial(_close, weakref.ref(self))
        with _more_workers_than_cores():
            self._loader: DataLoader[BatchResult | None] | None = DataLoader(
                _Reader(ReadOptions(seed, fps_max, rand_sample_interval, motion_score, _stored_names(table))),
                batch_size=None,
                sampler=self._tasks,
                collate_fn=_as_it_is,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor if num_workers else None,
                multiprocessing_context=prepare_workers() if num_workers else None,
                worker_init_fn=start_worker,
                pin_memory=pin_memory and torch.cuda.is_available(),
                timeout=min(_POLL_S, timeout_s) if num_workers else 0,
                # One of its own, for a seed that nothing uses: the global one is left alone.
                generator=torch.Generator(),
            )

    def read(self, batches: Sequence[Batch], epoch: int) -> Iterator[ClipBatch]:
        """The batches, in order. A slice of a plan (`plan[step:]`) starts there, and nothing before it is decoded.

        Calling this again breaks off what an earlier call still had to give.

        Raises:
            DataError: a clip fails and so do those in its place, or too many fail in all.
            RunError: a worker died, or nothing came for `timeout_s` seconds.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        self._pass += 1
        as_tensor = self._num_workers == 0 or _fits_shared_memory(batches, self._ahead)
        number = self._pass
        self._tasks.current = (self._task(batch, epoch, number, as_tensor) for batch in batches)
        return self._deliver(batches, number)

    def _deliver(self, batches: Sequence[Batch], number: int) -> Iterator[ClipBatch]:
        limit = FailureLimit(self._max_bad_fraction, _clips_in(batches))
        for batch in batches:
            began = time.perf_counter()
            result = self._next(number)
            if result.error is not None:
                raise result.error from (_WorkerTraceback(result.details) if result.details else None)
            limit.add(len(batch.rows), result.replaced)
            video = torch.from_numpy(result.video) if isinstance(result.video, np.ndarray) else result.video
            assert video is not None
            yield ClipBatch(
                video=video,
                rows=result.rows,
                positions=batch.positions,
                texts=result.texts,
                fps=result.fps,
                motion_scores=result.motion_scores,
                replaced=tuple((failure.row, str(failure)) for failure in result.replaced),
                shortened=tuple((failure.row, str(failure)) for failure in result.shortened),
                wait_s=time.perf_counter() - began,
            )

    def _next(self, number: int) -> BatchResult:
        """The next result of pass `number`; those of passes that were broken off are dropped."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._closed or number != self._pass:
                raise ValueError("the loader was closed, or another pass was begun")
            try:
                result = next(self._running())
            except (RuntimeError, OSError, EOFError) as error:
                # A worker that dies between sending a tensor and handing its memory over shows as an OSError. When
                # DataLoader times out it keeps its place, so it can be asked again.
                if "timed out" not in str(error) or time.monotonic() >= deadline:
                    ends = _ends(self._workers)
                    self.close()
                    raise _worker_error(error, ends, self._timeout_s) from error
                continue
            if result is not None and result.number == number:
                return result

    def _running(self) -> Iterator[BatchResult | None]:
        """The one iterator over DataLoader, whose workers start with it."""
        if self._results is None:
            assert self._loader is not None
            before = {process.pid for process in multiprocessing.active_children()}
            with _more_workers_than_cores():
                self._results = iter(self._loader)
            # Registered after DataLoader's own, so it comes first: that would wait for workers nobody has asked to end.
            atexit.register(self._at_exit)
            self._workers = [p for p in multiprocessing.active_children() if p.pid not in before]
        return self._results

    def _task(self, batch: Batch, epoch: int, number: int, as_tensor: bool) -> BatchTask:
        return BatchTask(
            number=number,
            epoch=epoch,
            frames=batch.frames,
            height=batch.height,
            width=batch.width,
            positions=batch.positions,
            clips=tuple(self._source(row) for row in batch.rows),
            spares=tuple(self._source(row) for row in self._spare_rows(batch, epoch)),
            as_tensor=as_tensor,
        )

    def _spare_rows(self, batch: Batch, epoch: int) -> list[int]:
        """Rows of the batch's bucket that are not in it, drawn for this batch, in the order they are tried in."""
        rng = draw_rng(self._seed, epoch, batch.positions[0], "spares")
        members, wanted = batch.members, len(batch.rows) + _SPARES
        places = rng.sample(range(len(members)), min(len(members), wanted + len(batch.rows)))
        others = (int(members[place]) for place in places if int(members[place]) not in batch.rows)
        return list(itertools.islice(others, wanted))

    def _source(self, row: int) -> ClipSource:
        table, scores = self._table, self._table.score_vmafmotion
        on_disk = isinstance(table.path, StoredColumn)
        return ClipSource(
            row=row,
            # Made absolute here, because a worker need not be in this process's folder.
            paths=() if on_disk else tuple(str(path.absolute()) for path in table.tried(row)),
            text="" if on_disk else table.text_of(row),
            num_frames=int(table.num_frames[row]),
            fps=float(table.fps[row]),
            motion_score=math.nan if scores is None else float(scores[row]),
        )

    def close(self) -> None:
        """Ends the workers. Whatever `read` still had to give raises ValueError."""
        self._closed = True
        atexit.unregister(self._at_exit)
        self._tasks.current = iter(())
        # Without its last reference the iterator asks its workers to end, and waits some seconds for them.
        self._results = self._loader = None
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
        self._workers = []


def _stored_names(table: ClipTable) -> StoredNames | None:
    """Where a worker finds paths and captions that are not in memory."""
    if not isinstance(table.path, StoredColumn):
        return None
    folders = [Path.cwd(), table.source.parent.absolute(), *([] if table.root is None else [table.root.absolute()])]
    return StoredNames(table.path.store, tuple(map(str, dict.fromkeys(folders))))


def _close(loader: weakref.ref[ClipLoader]) -> None:
    alive = loader()
    if alive is not None:
        alive.close()


def prepare_workers() -> BaseContext:
    """How workers are started. The first call begins a server that imports torch and the decoder while this process
    goes on; each worker is then a fork of it. Called early, before models are built, the wait for it is hidden."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The process that tidies up after a trainer that was killed would tell of each semaphore it removes.
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)
    try:
        multiprocessing.resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(option)
    multiprocessing.forkserver.ensure_running()
    return context


def _ends(workers: Sequence[BaseProcess]) -> list[str]:
    """How those ended that have."""
    ends = []
    for worker in workers:
        # Its pipe may break a moment before its end is known.
        worker.join(0.1)
        code = worker.exitcode
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            ends.append(f"process {worker.pid} {how}")
    return ends


def _worker_error(error: Exception, ends: Sequence[str], timeout_s: float) -> RunError:
    if not ends and "timed out" in str(error):
        return RunError(
            f"the loader's workers gave no batch for {timeout_s:g} seconds",
            hint="look whether the storage of the clips answers",
        )
    reason = ", ".join(ends) or str(error).strip().partition("\n")[0] or type(error).__name__
    return RunError(
        f"a worker of the loader ended: {reason}",
        hint="it may have had too little memory: lower `--num_workers`, `--prefetch_factor` or the batch size",
    )


def _clips_in(batches: Sequence[Batch]) -> int:
    if isinstance(batches, EpochPlan):
        return batches.num_clips
    return sum(len(batch.rows) for batch in batches)


def _fits_shared_memory(batches: Sequence[Batch], ahead: int) -> bool:
    """Whether all batches that are on their way at once have room in /dev/shm, which containers often keep small."""
    if isinstance(batches, EpochPlan):
        largest = batches.largest_batch_bytes
    else:
        largest = max((3 * len(b.rows) * b.frames * b.height * b.width for b in batches), default=0)
    free = 0
    with suppress(OSError):
        stats = os.statvfs(_SHARED_MEMORY)
        free = stats.f_bavail * stats.f_frsize
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The caller holds one batch more, and pinning another.
    return largest * (ahead + 2) * ranks_here < 0.8 * free
