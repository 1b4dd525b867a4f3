"""The output folder of a reconstruction: made, and rid of what an earlier run of ours left there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from osora_cli.app.reconstruct.output import ORIG, PAIR, RECN, Files
from osora_cli.errors import SetupError

METRICS_NAME = "metrics.json"
PICTURE_NAME = "side_by_side.png"
_VIDEO_KEYS = (ORIG, RECN, PAIR)  # of a clip in metrics.json; also the folders


def make_folders(files: Files) -> None:
    """Make the output folder and one for each side. Raises SetupError where they cannot be written to."""
    try:
        for side in files.sides:
            (files.folder / side).mkdir(parents=True, exist_ok=True)
            probe = files.folder / side / f".write-test.{os.getpid()}"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise SetupError(
            f"cannot write to `{files.folder}`: {error.strerror}",
            where="save_dir",
            hint="choose another folder with `--save-dir DIR`, or give this one write permission",
        ) from error


def earlier_files(folder: Path) -> set[str]:
    """Videos and stills that the metrics.json in `folder` lists and that are there, relative to it.

    Only names of the kind that a reconstruction makes, directly inside its own folders: a file that says otherwise
    must not lead anywhere else. Empty where there is no such file, or it is not ours.
    """
    try:
        listed = json.loads((folder / METRICS_NAME).read_bytes())
        clips = [clip for clip in listed["clips"] if isinstance(clip, dict)] if "protocol" in listed else []
    except (OSError, ValueError, TypeError, KeyError):
        return set()
    names = {str(clip[key]) for clip in clips for key in _VIDEO_KEYS if clip.get(key)}
    return {name for name in names if _is_ours(name) and (folder / name).is_file()}


def remove_earlier(folder: Path, new: Iterable[str]) -> list[str]:
    """Remove the files of an earlier run that this one has not written again; gives their names.

    Files of other makers stay, and so does whatever metrics.json does not list.
    """
    removed = []
    for name in sorted(earlier_files(folder) - set(new)):
        (folder / name).unlink(missing_ok=True)
        removed.append(name)
    return removed


def _is_ours(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        len(path.parts) == 2
        and path.parts[0] in _VIDEO_KEYS
        and path.name not in ("", ".", "..")
        and path.suffix in (".mp4", ".png")
    )
