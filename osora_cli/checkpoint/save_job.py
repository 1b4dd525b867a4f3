"""One save from the first byte to the commit, in the order of the protocol.

In asynchronous mode it runs in a thread of its own while the training goes on, in synchronous mode in the caller's.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from osora_cli import __version__
from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.comm import Comm, together
from osora_cli.checkpoint.commit import Commit, SmallState, cover, optimizer_lag
from osora_cli.checkpoint.events import SaveError, SaveEvent
from osora_cli.checkpoint.manifest import Manifest
from osora_cli.checkpoint.owner import Heartbeat
from osora_cli.checkpoint.replicas import ReplicaSums, agreement_fault
from osora_cli.checkpoint.retention import Retention
from osora_cli.checkpoint.snapshot import Snapshot
from osora_cli.checkpoint.staging import HostCopier, SlabPool
from osora_cli.checkpoint.tensor_files import Ranges, TensorFiles
from osora_cli.checkpoint.writer.base import Writer
from osora_cli.errors import OsoraError

_PUBLISH_WAIT_S = 2.0  # for a rename and its fsync, when the process is about to end


@dataclass
class SaveTools:
    """What all saves of a store share."""

    run_dir: Path
    async_io: bool
    comm: Comm
    writer: Writer
    retention: Retention
    on_phase: Callable[[str], None]


class SaveJob:
    """A save in flight.

    Attributes:
        taken: set when the training's tensors have been copied, or all copies are queued behind the copier's last
            mark (also when the save failed).
        ended: set at the end of it.
        error: why it failed.
        sequence: number of the save in its run.
        update: the checkpoint's update.
    """

    def __init__(
        self,
        tools: SaveTools,
        snapshot: Snapshot,
        small: SmallState,
        staging: Path,
        copier: HostCopier,
        pool: SlabPool,
        sequence: int,
        started: float,
    ) -> None:
        self.taken = threading.Event()
        self.ended = threading.Event()
        self.error: OsoraError | None = None
        self.sequence = sequence
        self.update = small.counters.actual_update_step
        self.stall = 0.0
        self._tools = tools
        self._snapshot = snapshot
        self._small = small
        self._staging = staging
        self._copier = copier
        self._started = started
        self._events: list[SaveEvent] = []
        self._final = tools.run_dir / small.counters.folder
        self._bytes = 0
        shared = tools.async_io and tools.comm.rank == 0
        log = staging / (layout.ASYNC_LOG if shared else f".{layout.ASYNC_LOG}-{tools.comm.rank}")
        self._files = TensorFiles(snapshot, staging, copier, pool, tools.writer, tools.comm, tools.on_phase, log)
        self._thread: threading.Thread | None = None
        self._held = False
        self._published = False
        self._commit_steps: Commit | None = None
        self._publishing = threading.Lock()
        self._given_up = False

    def start(self) -> None:
        """Run in the background. No daemon: the interpreter waits for a save in flight before it ends."""
        self._thread = threading.Thread(target=self.run, name="osora-save", daemon=False)
        self._thread.start()

    def hold_update(self) -> None:
        """Wait until the next update cannot reach the snapshot's bytes any more."""
        if not self._held:
            started = time.monotonic()
            self._held = True
            self.taken.wait()
            self._copier.hold_update()
            self.stall += time.monotonic() - started

    @property
    def has_host_tensors(self) -> bool:
        return self._snapshot.has_host_tensors

    def join(self) -> None:
        self.ended.wait()
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> bool | None:
        """See that the checkpoint is not published from now on, without waiting for the disk.

        Returns:
            Whether it was published before; None: it is just about to be.
        """
        self._given_up = True
        if not self._publishing.acquire(timeout=_PUBLISH_WAIT_S):
            return None
        self._publishing.release()
        return self._commit_steps is not None and self._commit_steps.published

    def events(self) -> list[SaveEvent]:
        """What happened, with the stall that is known by now; each event once."""
        stall = self.stall + self._copier.device_stall() if self._events else 0.0
        events, self._events = self._events, []
        return [event if event.kind == "removed" else replace(event, stall_seconds=stall) for event in events]

    def run(self) -> None:
        """The whole save. Errors are kept in `error`; only what is no `Exception` is raised."""
        lead = self._tools.comm.rank == 0
        heartbeat = Heartbeat(self._staging) if lead else None
        try:
            self._save()
        except BaseException as error:
            what = "is saved, but what comes after went wrong" if self._published else "was not saved"
            self.error = _as_error(error, f"checkpoint `{self._final.name}` {what}", self._final)
            self._events.append(self._event("failed", error=str(self.error)))
            if lead:
                with suppress(OSError):
                    fsio.remove_tree(self._staging)
            if not isinstance(error, Exception):
                raise
        finally:
            if heartbeat is not None:
                heartbeat.close()
            self._files.abandon()
            self._snapshot.release()
            self.taken.set()
            self.ended.set()

    def _save(self) -> None:
        comm, phase = self._tools.comm, self._tools.on_phase

        def write() -> tuple[Ranges, list[int]]:
            self._files.write(self.taken)
            self._snapshot.release()
            ranges = self._files.sync()
            phase("report")
            return ranges, sums.read()

        with self._copier.scope():
            self._files.create()
            sums = ReplicaSums(self._snapshot.replicas())
            self._files.exchange()
            written = together(comm, write)
        self._require_agreement([of_rank for _, of_rank in written])
        reports = [ranges for ranges, _ in written]
        self._bytes = together(comm, lambda: self._commit(reports) if comm.rank == 0 else 0)[0]
        self._events.insert(0, self._event("committed"))

    def _require_agreement(self, sums: list[list[int]]) -> None:
        """On every rank. Raises SaveError where ranks that hold the same do not."""
        fault = agreement_fault(self._snapshot.plan, sums)
        if fault is not None:
            raise SaveError(
                f"checkpoint `{self._final.name}` was not saved: {fault}",
                where=str(self._final.parent),
                hint="they have drifted apart: `osora resume RUN` goes on from the checkpoint before",
            )

    def _commit(self, reports: list[Ranges]) -> int:
        """Rank 0: prove and publish. Returns the checkpoint's size in bytes."""
        tools, plan = self._tools, self._snapshot.plan
        commit = Commit(tools.run_dir, self._staging, self._small, async_io=tools.async_io, on_phase=tools.on_phase)
        tools.on_phase("cover-check")
        records = cover(plan, reports, self._staging)
        lag = optimizer_lag(plan, self._staging, self._small.counters)
        records.update(commit.write_small_files(len(plan.files)))
        manifest = Manifest(
            counters=self._small.counters,
            sequence=self.sequence,
            parts=self._small.parts,
            files=records,
            optimizer_lag=lag,
            async_io=tools.async_io,
            writer=tools.writer.name,
            world_size=tools.comm.world_size,
            plan_digest=plan.digest,
            osora_version=__version__,
            provenance=dict(self._small.provenance),
        )
        size = manifest.total_bytes + commit.write_manifest(manifest)
        self._commit_steps = commit
        with self._publishing:
            if self._given_up:
                raise SaveError(f"checkpoint `{self._final.name}` was not saved: the process ends")
            commit.publish()
        self._published = True
        commit.point_latest()
        self._tidy(commit)
        return size

    def _tidy(self, commit: Commit) -> None:
        """Drop what the checkpoint replaced and what retention lets go. What cannot be removed is told, no more."""
        tools = self._tools
        try:
            commit.drop_replaced()
            tools.on_phase("retention")
            for folder, problem in tools.retention.remove(commit.final, tools.on_phase):
                self._events.append(SaveEvent("removed", folder, error=problem))
        except OSError as error:
            self._events.append(SaveEvent("removed", commit.final, error=f"retention stopped: {error}"))

    def _event(self, kind: Literal["committed", "failed"], error: str | None = None) -> SaveEvent:
        seconds = time.monotonic() - self._started
        return SaveEvent(kind, self._final, self._small.counters, self._bytes, seconds, error=error)


def _as_error(error: BaseException, what: str, final: Path) -> OsoraError:
    """What the caller gets to see."""
    if isinstance(error, OsoraError):
        return error
    reason, hint = str(error) or type(error).__name__, None
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.filename:
            reason += f" (`{Path(str(error.filename)).name}`)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free space on that disk, or keep fewer checkpoints (--keep-n-latest)"
    failure = SaveError(f"{what}: {reason}", where=str(final.parent), hint=hint)
    failure.__cause__ = error
    return failure
