"""The seam between a checkpoint and the disk: how bytes of a buffer reach a file."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.manifest import DigestRange


@dataclass
class TargetFile:
    """A file of the staging folder, open for writing at its full size.

    Attributes:
        name: relative to the checkpoint.
        path: where it is now.
        fd: kept open from before the first write, so that a write error of the kernel's is not missed by `sync`.
    """

    name: str
    path: Path
    fd: int

    @classmethod
    def open(cls, name: str, path: Path) -> TargetFile:
        return cls(name, path, os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    @classmethod
    def create(cls, name: str, path: Path, size: int) -> TargetFile:
        """Make the file at its full size.

        Raises:
            OSError: the blocks are not to be had.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with fsio.naming(path):
                fsio.preallocate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(name, path, fd)

    def sync_and_close(self) -> None:
        """Wait until the file's bytes are on the disk, and close it.

        Raises:
            OSError: from either; a network filesystem may tell of lost writes only when the file is closed.
        """
        fd, self.fd = self.fd, -1
        try:
            getattr(os, "fdatasync", os.fsync)(fd)
        except OSError as error:
            with suppress(OSError):
                os.close(fd)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        try:
            os.close(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def abandon(self) -> None:
        """Close it without asking how the writes went."""
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
            self.fd = -1


class Writer(Protocol):
    """Writes buffers at offsets of open files, in the background."""

    @property
    def name(self) -> str:
        """As it goes into the manifest."""
        ...

    def begin(self, log: Path) -> None:
        """A save begins. A writer with a log of its own appends to `log`; others leave it alone."""
        ...

    def submit(self, file: TargetFile, offset: int, buffer: memoryview) -> Future[DigestRange]:
        """Begin to write a buffer.

        The buffer must not change until the future is done. Its result is the range with its digest; its exception
        is the error of the write. Submitted ranges of one file must not overlap.
        """
        ...

    def drain(self) -> None:
        """Wait until nothing is under way. Errors stay in the futures."""
        ...

    def close(self) -> None:
        """Drain and end."""
        ...
