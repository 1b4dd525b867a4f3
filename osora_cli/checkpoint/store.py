"""Saves checkpoints so that a crash, a full disk or a power cut never costs the one before."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from osora_cli.checkpoint.comm import SINGLE, Comm, agree, together
from osora_cli.checkpoint.commit import SmallState
from osora_cli.checkpoint.contents import CheckpointContents, LocalSpec, local_specs, merge_specs
from osora_cli.checkpoint.events import PHASES, Saved, SaveError, SaveEvent
from osora_cli.checkpoint.layout import GROUPS, rng_file
from osora_cli.checkpoint.plan import MIB, PAGE, RANGE_LIMIT, SHARD_LIMIT, Plan, PlanError, make_plan
from osora_cli.checkpoint.retention import Retention
from osora_cli.checkpoint.save_job import SaveJob, SaveTools
from osora_cli.checkpoint.smallfiles import full_tensors, rng_bytes, small_files
from osora_cli.checkpoint.snapshot import Snapshot
from osora_cli.checkpoint.space import make_staging, readable_size, require_space
from osora_cli.checkpoint.staging import CudaCopier, HostCopier, SlabPool
from osora_cli.checkpoint.verify import newest_sequence
from osora_cli.checkpoint.writer.base import Writer
from osora_cli.checkpoint.writer.tensornvme import TensorNvmeWriter, load_writer_class
from osora_cli.checkpoint.writer.threads import ThreadWriter
from osora_cli.errors import OsoraError, SetupError, UsageError
from osora_cli.tensors import TensorShard

__all__ = ["PHASES", "CheckpointStore", "SaveError", "SaveEvent", "require_writer"]

DEFAULT_BUFFER = 16 << 30
_SYNC_SLABS = 4  # a save that nobody trains beside needs no more than keeps the disk busy
_MARGIN = MIB  # beside the files themselves: manifest, folders


# One rank's small state: digest of what tensors it holds, files (path -> bytes), generator states. Plain, for `Comm`.
_LocalState = tuple[str, dict[str, bytes], bytes]


class CheckpointStore:
    """Writes the checkpoints of one run; one save is in flight at a time.

    Args:
        run_dir: the run's folder.
        async_io: write in the background; save() returns once the state is copied.
        backend: "auto", "threads" or "tensornvme".
        keep_n_latest: checkpoints to keep, at least one; -1: all.
        keep_every: keep the first checkpoint of every so many updates for good; 0: none.
        buffer_bytes: the most host memory for staging; a larger state is copied in pieces, as the disk takes them.
        protected: a checkpoint that retention never removes (the one the run was resumed from).
        on_event: gets the events of saves, in the thread that calls save(), poll(), finish() or close().
        on_phase: called right before each step of `PHASES`, in whichever thread takes it.
        comm: the ranks of the run.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        async_io: bool,
        backend: str = "auto",
        keep_n_latest: int = -1,
        keep_every: int = 0,
        buffer_bytes: int = DEFAULT_BUFFER,
        protected: Path | None = None,
        on_event: Callable[[SaveEvent], None] | None = None,
        on_phase: Callable[[str], None] | None = None,
        comm: Comm = SINGLE,
        shard_limit: int = SHARD_LIMIT,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._folder = _identity(self.run_dir)
        self._tools = SaveTools(
            self.run_dir,
            async_io,
            comm,
            _writer(backend),
            Retention(self.run_dir, keep_n_latest, protected, keep_every),
            on_phase or (lambda name: None),
        )
        self._buffer_bytes = buffer_bytes
        self._range_limit = min(RANGE_LIMIT, max(PAGE, buffer_bytes // 2 // PAGE * PAGE))
        self._shard_limit = shard_limit
        self._on_event = on_event or (lambda event: None)
        self._job: SaveJob | None = None
        self._errors: list[OsoraError] = []
        self._plan: tuple[list[str], Plan] | None = None
        self._pool: SlabPool | None = None
        self._copier: HostCopier | None = None
        self._sequence: int | None = None
        self._saved: int | None = None
        self._given_up = False

    @property
    def writer_name(self) -> str:
        """Who writes the bytes: "threads" or "tensornvme"."""
        return self._tools.writer.name

    def _require_same_folder(self) -> None:
        """A run that was renamed while it trains must not begin a second folder under its old name."""
        now = _identity(self.run_dir)
        if self._folder is None:
            self._folder = now
        elif now != self._folder:
            raise SaveError(
                f"the run's folder `{self.run_dir}` was moved or replaced while the run went on",
                hint="put it back under its name; checkpoints that were saved before are in it",
            )

    def require_room(self, needed: int) -> None:
        """Refuse a disk that has no room for one checkpoint of `needed` bytes. Rank 0 looks, all ranks raise.

        Raises:
            SetupError: too little space, or a folder that cannot be written to.
        """

        def fault() -> tuple[str, str | None] | None:
            if self._tools.comm.rank:
                return None
            try:
                require_space(self.run_dir, needed + _MARGIN)
            except SetupError as error:
                return error.message, error.hint
            return None

        found = together(self._tools.comm, fault)[0]
        if found is not None:
            raise SetupError(found[0], where=str(self.run_dir), hint=found[1])

    def shortage(self, held: int) -> str | None:
        """What to say where this rank's `held` bytes of a checkpoint do not fit the staging buffers at once."""
        if not self._tools.async_io or held <= self._buffer_bytes:
            return None
        all_of_it = math.ceil(held / 2**30 * 10) / 10
        return (
            f"a checkpoint's {readable_size(held)} go through {readable_size(self._buffer_bytes)} of staging buffers: "
            f"the training waits until the rest is written; `--async-io-buffer-gib {all_of_it:g}` holds all"
        )

    def reserve(self, sharded: Mapping[str, Sequence[TensorShard]]) -> None:
        """Make the buffers for this rank's tensors in the background, so that the first save need not wait for them.

        Of use on a GPU in asynchronous mode, else it does nothing: there buffers are page-locked, which is slow.
        """
        tensors = [shard.tensor for shards in sharded.values() for shard in shards]
        if not self._tools.async_io or self._pool is not None or not any(t.device.type == "cuda" for t in tensors):
            return
        total = sum(tensor.nbytes for tensor in tensors)
        size = min(self._range_limit, max(PAGE, 1 << (total - 1).bit_length()))
        pool = self._pool = SlabPool(size, self._buffer_bytes, pinned=True)
        threading.Thread(target=pool.reserve, args=(total + size,), name="osora-reserve", daemon=True).start()

    def save(self, contents: CheckpointContents) -> None:
        """Save the state as it is now.

        Waits for the save before it, if that is still in flight. In asynchronous mode it returns once the tensors are
        copied (of a GPU: once the copy is ordered; call before_update() ahead of whatever changes them). In
        synchronous mode it returns when the checkpoint is committed.

        Raises:
            SetupError: no space, or a folder that cannot be written to. Nothing was written.
            SaveError: the ranks disagree, the contents could not be resumed from, or (synchronous mode) a write
                failed. A save before this one that failed in the background is reported by poll() and finish().
        """
        started = time.monotonic()
        self._collect(wait=True)
        self._require_same_folder()
        waited = time.monotonic() - started
        job = self._prepare(contents, started)
        job.stall = waited
        self._job = job
        self._on_event(SaveEvent("submitted", self.run_dir / contents.counters.folder, contents.counters))
        if not self._tools.async_io:
            running = time.monotonic()
            try:
                job.run()
            finally:
                job.stall += time.monotonic() - running
            self._collect(wait=True)
            self._raise()
            return
        job.start()
        if job.has_host_tensors:
            copying = time.monotonic()
            job.taken.wait()
            job.stall += time.monotonic() - copying

    def before_update(self) -> None:
        """Call before anything changes the tensors given to save(): the only place where a GPU's training waits."""
        if self._job is not None:
            self._job.hold_update()

    def poll(self) -> None:
        """Deliver what has happened since.

        Raises:
            SaveError: a save in the background failed (once for each).
        """
        self._collect(wait=False)
        self._raise()

    def finish(self) -> None:
        """Wait for the save in flight and deliver what happened.

        Raises:
            SaveError: it failed, or an earlier one did.
        """
        self._collect(wait=True)
        self._raise()

    def close(self) -> None:
        """Wait for the save in flight, deliver what happened and end the writer. Raises nothing: see finish().

        After give_up() it does nothing.
        """
        if self._given_up:
            return
        self._collect(wait=True)
        self._tools.writer.close()
        self._pool = None

    def give_up(self) -> Saved:
        """Wait for nothing any more, for a process that is about to end: a save in flight is never published.

        What it has written stays in its staging folder, for the next resume to remove.
        """
        self._given_up = True
        job, self._job = self._job, None
        published = job.give_up() if job is not None else False
        if job is not None and published:
            self._saved = job.update
        return Saved(self._saved, job.update if job is not None and published is None else None)

    def _collect(self, *, wait: bool) -> None:
        job = self._job
        if job is None or not (wait or job.ended.is_set()):
            return
        job.join()
        if job.error is not None:
            self._errors.append(job.error)
        else:
            self._saved = job.update
        self._job = None
        for event in job.events():
            self._on_event(event)

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _prepare(self, contents: CheckpointContents, started: float) -> SaveJob:
        """Everything that has to happen in the caller's thread: plan, small state, staging folder."""
        tools = self._tools
        try:
            tools.on_phase("plan")
            ranks = together(tools.comm, lambda: self._local_state(contents))
            plan = self._agreed_plan(contents, [digest for digest, _, _ in ranks])
            small = self._small_state(contents, plan, ranks)
            snapshot = Snapshot(plan, tools.comm.rank, self._planned(contents), self._range_limit)
            copier, slabs = self._copier_for(snapshot), self._slabs(snapshot)
            staging = self._staging_folder(contents, plan, small)
        except (ValueError, RuntimeError, OSError) as error:  # plan errors, disagreement, another rank's error
            if isinstance(error, OsoraError):
                raise
            name = contents.counters.folder
            raise SaveError(f"checkpoint `{name}` was not saved: {error}", where=str(self.run_dir)) from error
        copier.begin()
        if self._sequence is None:
            self._sequence = newest_sequence(self.run_dir)
        self._sequence += 1
        return SaveJob(tools, snapshot, small, staging, copier, slabs, self._sequence, started)

    def _local_state(self, contents: CheckpointContents) -> _LocalState:
        """What this rank brings along beside its tensors, as it is now."""
        contents.check()
        specs = self._local_specs(contents)
        digest = xxhash.xxh3_128_hexdigest(repr(specs).encode())
        return digest, small_files(contents), rng_bytes(contents.rng)

    def _local_specs(self, contents: CheckpointContents) -> list[tuple[str, list[LocalSpec]]]:
        return [(group, local_specs(group, shards)) for group, shards in self._planned(contents).items()]

    def _planned(self, contents: CheckpointContents) -> dict[str, list[TensorShard]]:
        """The groups that go to tensor files: all, but for EMA in synchronous mode."""
        return {g: s for g, s in contents.sharded.items() if self._tools.async_io or g != "ema"}

    def _agreed_plan(self, contents: CheckpointContents, digests: list[str]) -> Plan:
        """The plan of the save before, while no rank's tensors have changed; else a new one that all agree on."""
        comm = self._tools.comm
        if self._plan is not None and self._plan[0] == digests:
            return self._plan[1]
        ranks = [dict(specs) for specs in comm.gather(self._local_specs(contents))]
        present = [group for group in GROUPS if any(group in specs for specs in ranks)]
        groups = {group: merge_specs(group, [specs.get(group, []) for specs in ranks]) for group in present}
        plan = make_plan(groups, comm.world_size, range_limit=self._range_limit, shard_limit=self._shard_limit)
        agree(comm, "the plan of the checkpoint", plan.digest)
        self._plan = (digests, plan)
        return plan

    def _small_state(self, contents: CheckpointContents, plan: Plan, ranks: list[_LocalState]) -> SmallState:
        files = {**plan.indexes, **ranks[0][1], **{rng_file(n): rng for n, (_, _, rng) in enumerate(ranks)}}
        ema = None
        if not self._tools.async_io and "ema" in contents.sharded:
            ema = full_tensors(self._tools.comm, "ema", contents.sharded["ema"])
        try:
            provenance = json.loads(json.dumps(contents.provenance, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise PlanError(f"the provenance is no JSON: {error}") from None
        return SmallState(contents.counters, files, ema, tuple(contents.parts), provenance)

    def _staging_folder(self, contents: CheckpointContents, plan: Plan, small: SmallState) -> Path:
        counters = contents.counters

        def make() -> str:
            if self._tools.comm.rank:
                return ""
            self._tools.on_phase("space-check")
            ema = sum(tensor.nbytes for tensor in (small.ema or {}).values())
            require_space(self.run_dir, plan.total_bytes + ema + sum(map(len, small.files.values())) + _MARGIN)
            self._tools.on_phase("stage-folder")
            return make_staging(self.run_dir, counters.epoch, counters.actual_update_step).name

        return self.run_dir / together(self._tools.comm, make)[0]

    def _copier_for(self, snapshot: Snapshot) -> HostCopier:
        if self._copier is None:
            self._copier = HostCopier() if snapshot.device is None else CudaCopier(snapshot.device)
        return self._copier

    def _slabs(self, snapshot: Snapshot) -> SlabPool:
        """The staging buffers, made anew only when they are too small."""
        wanted = max((piece.size for piece in snapshot.pieces), default=PAGE)
        pinned = snapshot.device is not None
        if self._pool is None or self._pool.slab_bytes < wanted or self._pool.pinned != pinned:
            size = max(PAGE, 1 << (wanted - 1).bit_length())
            limit = self._buffer_bytes if self._tools.async_io else min(self._buffer_bytes, _SYNC_SLABS * size)
            self._pool = SlabPool(size, limit, pinned=pinned)
        return self._pool


def require_writer(backend: str) -> None:
    """Refuse a backend that cannot run here, before anything is built or written.

    Raises:
        UsageError: no such name.
        SetupError: tensornvme is asked for and not to be had.
    """
    if backend not in ("auto", "threads", "tensornvme"):
        raise UsageError(f"unknown async_io_backend `{backend}`", allowed="auto, threads, tensornvme")
    if backend == "tensornvme":
        load_writer_class()


def _writer(backend: str) -> Writer:
    """The writer by its name in the config; "auto" is tensornvme wherever that can run. Raises as `require_writer`."""
    require_writer(backend)
    if backend != "threads":
        try:
            return TensorNvmeWriter()
        except SetupError:
            if backend == "tensornvme":
                raise
    return ThreadWriter()


def _identity(folder: Path) -> tuple[int, int] | None:
    """What stays the same of a folder when it is renamed; None where there is none."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
