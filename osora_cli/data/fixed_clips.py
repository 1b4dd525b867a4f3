"""Clips that a training is scored on: drawn once, always the same frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from osora_cli.data.buckets import BucketTable
from osora_cli.data.crop import draw_frame_indices
from osora_cli.data.draws import draw_rng
from osora_cli.data.fps import map_target_fps
from osora_cli.data.media import MediaError, is_still, read_frames
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import resize_crop_image, resize_crop_uint8
from osora_cli.errors import ConfigError, DataError

_SHOWN = 5
# Draws of a clip's window before it is given up as one of those that are there already.
_TRIES = 8


@dataclass(frozen=True)
class FixedClip:
    """One window of one clip.

    Attributes:
        row: of the table.
        path: as written there.
        file: the file.
        indices: frames of the file, in order.
        size: height and width it is brought to, pixels.
    """

    row: int
    path: str
    file: Path
    indices: tuple[int, ...]
    size: tuple[int, int]

    @property
    def name(self) -> str:
        """For a title: the file's name and the first frame."""
        return f"{Path(self.path).stem} from frame {self.indices[0]}"

    def read(self) -> torch.Tensor:
        """Frames uint8 `[3, T, H, W]`, resized as the training's are. Raises MediaError."""
        pixels = read_frames(self.file, list(self.indices))
        if is_still(self.file):
            frames = resize_crop_image(pixels[0], self.size)[None]
        else:
            frames = resize_crop_uint8(torch.from_numpy(pixels).permute(0, 3, 1, 2), self.size)
        return frames.permute(1, 0, 2, 3).contiguous()


def plan_fixed_clips(
    table: ClipTable,
    *,
    resolution: str,
    frames: int,
    number: int,
    rows: Sequence[int] | None,
    seed: int,
    spatial_compression: int,
    fps_max: float | None,
) -> list[FixedClip]:
    """Draw the clips and their windows; the same for the same table and arguments, whatever else is drawn.

    Args:
        rows: those to take, in this order; None: `number` rows drawn from all that fit, in the table's order.
        number: clips wanted. Where rows are fewer, each gives several windows that differ.
        spatial_compression: what height and width are multiples of.

    Returns:
        Clips of one size follow each other. Fewer than `number` where the clips have no more different windows.

    Raises:
        ConfigError: a row that the table does not have.
        DataError: no row fits, or a given one does not.
    """
    bucket_table = BucketTable({resolution: {frames: (1.0, 1)}}, spatial_compression)
    ids = bucket_table.assign(table.num_frames, table.height, table.width, table.fps, fps_max=fps_max, seed=0)
    chosen = _rows(table, ids, rows, number, seed, lambda row: _why_not(table, bucket_table, row, fps_max))
    clips: list[FixedClip] = []
    windows: set[tuple[int, ...]] = set()
    for k in range(-(-number // len(chosen))):
        for row in chosen[: number - k * len(chosen)]:
            bucket = bucket_table.buckets[ids[row]]
            indices = _window(table, row, frames, fps_max, seed, k, windows)
            if indices is not None:
                windows.add((row, *indices))
                size = (bucket.height, bucket.width)
                clips.append(FixedClip(row, table.path_of(row), table.resolve(row), indices, size))
    return sorted(clips, key=lambda clip: clip.size)


def _why_not(table: ClipTable, buckets: BucketTable, row: int, fps_max: float | None) -> str:
    facts = (int(table.num_frames[row]), int(table.height[row]), int(table.width[row]), float(table.fps[row]))
    return f"`{table.path_of(row)}` (row {row}): {buckets.explain(*facts, fps_max=fps_max)}"


def _rows(
    table: ClipTable,
    ids: NDArray[np.int32],
    rows: Sequence[int] | None,
    number: int,
    seed: int,
    why_not: Callable[[int], str],
) -> list[int]:
    """The rows that are scored."""
    if rows is None:
        fitting = np.flatnonzero(ids >= 0).tolist()
        if not fitting:
            shown = "; ".join(why_not(row) for row in range(min(len(table), _SHOWN)))
            raise DataError(f"no clip of the table is long and large enough to be scored on: {shown}", where="eval")
        return sorted(draw_rng(seed, "eval rows").sample(fitting, min(number, len(fitting))))
    outside = [row for row in rows if not 0 <= row < len(table)]
    if outside or not rows:
        raise ConfigError(f"`eval.rows` is `{list(rows)}`", where="eval.rows", allowed=f"rows 0 to {len(table) - 1}")
    unfit = [why_not(row) for row in rows if ids[row] < 0]
    if unfit:
        raise DataError(f"rows that are too short or too small to be scored on: {'; '.join(unfit)}", where="eval.rows")
    return list(rows)


def _window(
    table: ClipTable, row: int, frames: int, fps_max: float | None, seed: int, k: int, taken: set[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The k-th window of a row, drawn by seed, row and k alone; None where it is hard to find one more."""
    total, interval = int(table.num_frames[row]), map_target_fps(float(table.fps[row]), fps_max)[1]
    rng = draw_rng(seed, "eval window", row, k)
    for _ in range(_TRIES):
        indices = tuple(int(i) for i in draw_frame_indices(total, frames, interval, rng))
        if (row, *indices) not in taken:
            return indices
    return None


def read_fixed_clips(clips: Sequence[FixedClip]) -> list[torch.Tensor]:
    """The frames of each clip, uint8 `[3, T, H, W]`.

    Raises:
        DataError: some cannot be read; all of them are named. A score over the others would be of another set.
    """
    videos, failed = [], []
    for clip in clips:
        try:
            videos.append(clip.read())
        except MediaError as error:
            failed.append(f"`{clip.path}` (row {clip.row}): {error.reason}")
    if failed:
        shown = "; ".join(failed[:_SHOWN]) + (f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else "")
        raise DataError(
            f"{len(failed)} of the {len(clips)} clips to be scored on cannot be read: {shown}",
            where="eval",
            hint="take them out of the table, name others with `--eval.rows`, or `--eval-every 0` to go without",
        )
    return videos
