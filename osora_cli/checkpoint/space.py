"""Whether a checkpoint has room, asked before anything is written. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.leftovers import new_id
from osora_cli.checkpoint.owner import write_owner
from osora_cli.errors import SetupError


def readable_size(count: int) -> str:
    """`12.9 GB`, `3.4 MB`: in powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def require_space(run_dir: Path, needed: int) -> None:
    """Raise unless the run's folder can be made and its filesystem has so many bytes left.

    Raises:
        SetupError: no right to write there, or too little space.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        free = fsio.free_bytes(run_dir)
    except OSError as error:
        raise _no_access(run_dir, error) from error
    if free < needed:
        raise SetupError(
            f"no space for a checkpoint: it takes {readable_size(needed)}, `{run_dir}` has {readable_size(free)} left",
            where=str(run_dir),
            hint="free space on that disk, keep fewer checkpoints (--keep-n-latest), or set --outputs to another disk",
        )


def make_staging(run_dir: Path, epoch: int, update: int) -> Path:
    """A new staging folder, owned by this process.

    Raises:
        SetupError: no right to write there, or no space.
    """
    staging = run_dir / f"{layout.STAGING_PREFIX}{epoch}-{update}-{new_id()}"
    try:
        staging.mkdir()
        write_owner(staging, "save")
    except OSError as error:
        fsio.remove_tree(staging)
        raise _no_access(run_dir, error) from error
    return staging


def _no_access(run_dir: Path, error: OSError) -> SetupError:
    reason = error.strerror or str(error)
    hint = "make the folder writable, or set --outputs to another one" if fsio.is_read_only(error) else None
    return SetupError(f"no checkpoint can be written to `{run_dir}`: {reason}", where=str(run_dir), hint=hint)
