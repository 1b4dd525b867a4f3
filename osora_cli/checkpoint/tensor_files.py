"""The tensor files of one save: made at full size, filled from the snapshot, synced. One object per rank and save."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.comm import Comm, together
from osora_cli.checkpoint.manifest import DigestRange, whole_record
from osora_cli.checkpoint.snapshot import Piece, Snapshot
from osora_cli.checkpoint.staging import HostCopier, Mark, Slab, SlabPool
from osora_cli.checkpoint.writer.base import TargetFile, Writer

# What a rank reports: path -> (offset, length, digest) of each range that it wrote.
Ranges = dict[str, list[tuple[int, int, str]]]


@dataclass
class _Staged:
    """A piece on its way from the tensors to the writer. `kept` lives until the copies are done."""

    piece: Piece
    slab: Slab
    mark: Mark
    kept: list[torch.Tensor]


@dataclass
class _Writes:
    """What the writer still owes, and what went wrong first."""

    futures: list[tuple[str, Future[DigestRange]]] = field(default_factory=list)
    error: BaseException | None = None


class TensorFiles:
    """Writes this rank's segments of the planned files into the staging folder.

    Args:
        snapshot: where the bytes come from; it knows plan and rank.
        staging: the folder.
        copier: how they get into the slabs.
        pool: the slabs.
        writer: how they get to the disk.
        comm: the ranks.
        on_phase: called before each step.
        log: for a writer that keeps a log of its own; a hidden one goes when the writes are done.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        staging: Path,
        copier: HostCopier,
        pool: SlabPool,
        writer: Writer,
        comm: Comm,
        on_phase: Callable[[str], None],
        log: Path,
    ) -> None:
        self._log = log
        self._snapshot = snapshot
        self._staging = staging
        self._copier = copier
        self._pool = pool
        self._writer = writer
        self._comm = comm
        self._phase = on_phase
        self._files: list[TargetFile] = []
        self._ranges: Ranges = {}

    def create(self) -> None:
        """Rank 0 makes the files at their full size, with their headers; then all ranks open them.

        Raises:
            OSError, RemoteError: no room, no right.
        """
        files = self._snapshot.plan.files

        def make() -> None:
            if self._comm.rank:
                return
            for folder in sorted({(self._staging / file.path).parent for file in files}):
                folder.mkdir(exist_ok=True)
            for file in files:
                self._phase("create")
                self._files.append(TargetFile.create(file.path, self._staging / file.path, file.size))
                self._phase("headers")
                with fsio.naming(self._files[-1].path):
                    fsio.write_all(self._files[-1].fd, file.raw_header, 0)
                header = whole_record(file.raw_header).ranges[0]
                self._ranges[file.path] = [(0, header.length, header.digest)]

        together(self._comm, make)
        if self._comm.rank:
            self._files = [TargetFile.open(file.path, self._staging / file.path) for file in files]

    def exchange(self) -> None:
        """Send bytes that lie in other ranks' pages to them, and take those that lie in this rank's.

        Raises:
            RemoteError: another rank could not.
        """
        if not any(file.transfers for file in self._snapshot.plan.files):
            return
        self._phase("exchange")
        for sent in together(self._comm, self._outgoing):
            for number, offset, data in sent.get(self._comm.rank, []):
                self._snapshot.received[number].append((offset, data))

    def _outgoing(self) -> dict[int, list[tuple[int, int, bytes]]]:
        wanted = list(self._snapshot.outgoing())
        buffer = torch.empty(sum(length for *_, length in wanted), dtype=torch.uint8, pin_memory=self._pool.pinned)
        position = 0
        kept = []
        for _, number, offset, length in wanted:
            target = buffer[position : position + length]
            kept += self._snapshot.copy_range(number, offset, offset + length, target, self._copier)
            position += length
        self._copier.mark().synchronize()
        sent: dict[int, list[tuple[int, int, bytes]]] = {}
        position = 0
        for rank, number, offset, length in wanted:
            data = buffer[position : position + length].numpy().tobytes()
            sent.setdefault(rank, []).append((number, offset, data))
            position += length
        return sent

    def write(self, taken: threading.Event) -> None:
        """Copy every piece into a slab and hand it to the writer; return when all is written.

        `taken` is set once all copies are under way on the device, or done in the host's memory: from then on the
        training need only order its next update behind the copier. With fewer slabs than pieces that takes as long as
        the writes of all but the last slabs.

        Raises:
            OSError: from a write.
        """
        writes = _Writes()
        staged: deque[_Staged] = deque()
        self._writer.begin(self._log)
        try:
            for piece in self._snapshot.pieces:
                slab = self._slab(staged, writes)
                self._phase("snapshot")
                try:
                    kept = self._snapshot.fill(piece, slab.tensor, self._copier)
                    staged.append(_Staged(piece, slab, self._copier.mark(), kept))
                except BaseException:
                    self._pool.release(slab)
                    raise
                while self._copier.eager and staged and staged[0].mark.query():
                    self._hand_over(staged.popleft(), writes)
                if writes.error is not None:
                    break
            taken.set()
            while staged and writes.error is None:
                self._hand_over(staged.popleft(), writes)
        finally:
            for left in staged:
                left.mark.synchronize()
                self._pool.release(left.slab)
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # who wants out now does not wait for the disk
                self._writer.drain()
        if self._log.name.startswith("."):
            self._log.unlink(missing_ok=True)
        if writes.error is not None:
            raise writes.error
        for path, future in writes.futures:
            done = future.result()
            self._ranges.setdefault(path, []).append((done.offset, done.length, done.digest))

    def _slab(self, staged: deque[_Staged], writes: _Writes) -> Slab:
        """A free slab; where the memory cap is reached, one that the writer gives back."""
        slab = self._pool.take()
        while slab is None and staged:
            self._hand_over(staged.popleft(), writes)
            slab = self._pool.take()
        return slab or self._pool.wait()

    def _hand_over(self, staged: _Staged, writes: _Writes) -> None:
        staged.mark.synchronize()
        staged.kept.clear()
        self._phase("write")
        left = [len(staged.piece.segments)]
        lock = threading.Lock()

        def done(future: Future[DigestRange]) -> None:
            error = future.exception()
            with lock:
                if error is not None and writes.error is None:
                    writes.error = error
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._pool.release(staged.slab)

        for number, segment, place in staged.piece.segments:
            file = self._files[number]
            view = staged.slab.view[place : place + segment.length]
            future = self._writer.submit(file, segment.offset, view)
            writes.futures.append((file.name, future))
            future.add_done_callback(done)

    def sync(self) -> Ranges:
        """Wait for the disk, close the files, and tell what this rank wrote.

        Raises:
            OSError: bytes that were written did not reach the disk.
        """
        for file in self._files:
            self._phase("fdatasync")
            file.sync_and_close()
        return self._ranges

    def abandon(self) -> None:
        """Close what is open; to be called in every case."""
        for file in self._files:
            file.abandon()
