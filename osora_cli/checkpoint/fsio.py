"""File operations that survive a power cut, and what the filesystem can tell. Knows no torch."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

try:
    _libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True)
except OSError:  # a static Python
    _libc = None


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until everything is written. A short write (a full disk, a signal, the kernel's 2 GiB limit) is resumed.

    Raises:
        OSError: what the kernel said; a write of nothing counts as EIO.
    """
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view[: 1 << 30], offset)
        if done <= 0:
            raise OSError(errno.EIO, "the write made no progress")
        view = view[done:]
        offset += done


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of calls on a descriptor do not say which file it is: here they do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_regular(path: Path) -> bytes:
    """A file's bytes. Where something else stands in its place it is not waited for, as a pipe would have to be.

    Raises:
        OSError: it is not there, cannot be read, or is no file.
    """
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", closefd=True) as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is no regular file")
            return file.read()


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file; it is on the disk when this returns (its name when the folder is synced)."""
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise
        os.close(fd)


def replace_durable(path: Path, data: bytes) -> None:
    """Replace a file at once: readers see the old or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durable(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # filesystems without it keep names in order themselves
            raise
    finally:
        os.close(fd)


def preallocate(fd: int, size: int) -> None:
    """Reserve the file's blocks, so that a full disk shows now and not in the middle; else only set the size."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the kernel begin to write these pages now, without waiting: fdatasync at the end finds little left to do.

    A hint: what it cannot do is no error, and write errors are not lost (fdatasync reports them).
    """
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. False where the system or the filesystem cannot."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    done = call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(done == 0)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the folder's filesystem."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def is_read_only(error: OSError) -> bool:
    return error.errno in _READ_ONLY


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; another process that removes it at the same time is no error.

    Raises:
        OSError: something is still there.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)
