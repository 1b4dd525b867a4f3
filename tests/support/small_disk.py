"""A real file system of a few megabytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """A tmpfs mounted at `folder`; the test is skipped, with the reason, where mounting is not allowed."""
    folder.mkdir(parents=True)
    size = f"size={int(megabytes * 1024)}k"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
