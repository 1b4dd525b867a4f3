"""One batch from files: what a loader's worker does.

A task carries all that is needed for its batch, so a worker holds no table and no generator: the same task gives the
same pixels in any process.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from osora_cli.data.crop import draw_frame_indices, draw_interval
from osora_cli.data.draws import draw_rng
from osora_cli.data.fps import add_caption_suffix, map_target_fps
from osora_cli.data.media import MediaError, is_still, probe, read_frames
from osora_cli.data.stored_text import StoredText
from osora_cli.data.transforms import resize_crop_image, resize_crop_uint8
from osora_cli.errors import DataError, OsoraError, RunError

_SHOWN = 5


class ClipSource(NamedTuple):
    """A row of the table: where its file may be (the first that exists is taken) and what the table says of it.

    Without `paths` the row's path and caption are on disk, and `ReadOptions.names` finds them.
    """

    row: int
    paths: tuple[str, ...]
    text: str
    num_frames: int
    fps: float
    motion_score: float


class StoredNames(NamedTuple):
    """Paths and captions that stay on disk, and the folders in which relative paths are tried, in this order."""

    text: StoredText
    folders: tuple[str, ...]

    def name(self, clip: ClipSource) -> ClipSource:
        """The clip with its paths and caption. Raises DataError where they cannot be read."""
        path, text = self.text.read(clip.row)
        return clip._replace(paths=tuple(os.path.join(folder, path) for folder in self.folders), text=text)


class ReadOptions(NamedTuple):
    """What is the same for every clip of a run."""

    seed: int
    fps_max: float | None
    rand_sample_interval: int | None
    motion_score: bool = False
    names: StoredNames | None = None


class BatchTask(NamedTuple):
    """A batch to read. `spares` are clips of the same bucket, taken in turn for those that cannot be read."""

    number: int  # of the pass it belongs to
    epoch: int
    frames: int
    height: int
    width: int
    positions: tuple[int, ...]
    clips: tuple[ClipSource, ...]
    spares: tuple[ClipSource, ...]
    as_tensor: bool  # a tensor travels through shared memory, an array through the pipe


class Failure(NamedTuple):
    """A clip that could not be used as the table says, and why."""

    row: int
    path: str
    reason: str

    def __str__(self) -> str:
        return f"`{self.path}`: {self.reason}"


@dataclass
class BatchResult:
    """What a worker sends: the pixels, or the error that ended it. Rows, texts and rates are of the clips delivered."""

    number: int
    video: Tensor | NDArray[np.uint8] | None = None
    rows: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    fps: tuple[float, ...] = ()
    motion_scores: tuple[float, ...] = ()
    replaced: tuple[Failure, ...] = ()
    shortened: tuple[Failure, ...] = ()
    error: OsoraError | None = None
    details: str = ""

    def pin_memory(self) -> BatchResult:
        """DataLoader calls this in its pinning thread."""
        if isinstance(self.video, np.ndarray):
            self.video = torch.from_numpy(self.video)
        if self.video is not None:
            self.video = self.video.pin_memory()
        return self


def read_batch(task: BatchTask, options: ReadOptions) -> BatchResult:
    """Reads a batch. Never raises: an error comes back as a value, so that it crosses processes as it is."""
    try:
        return _BatchReader(task, options).read()
    except OsoraError as error:
        return BatchResult(task.number, error=error)
    except Exception as error:
        clips = ", ".join(f"`{clip.paths[0]}`" if clip.paths else f"row {clip.row}" for clip in task.clips[:_SHOWN])
        reason = RunError(f"reading a batch of {clips} ended in {type(error).__name__}: {error}")
        return BatchResult(task.number, error=reason, details=traceback.format_exc())


class _BatchReader:
    def __init__(self, task: BatchTask, options: ReadOptions) -> None:
        self._task, self._options = task, options
        self._size = (task.height, task.width)
        self._spares = list(reversed(task.spares))
        self._replaced: list[Failure] = []
        self._shortened: list[Failure] = []

    def read(self) -> BatchResult:
        task = self._task
        video = torch.empty((len(task.clips), 3, task.frames, task.height, task.width), dtype=torch.uint8)
        used = [self._fill(video[i], clip, task.positions[i]) for i, clip in enumerate(task.clips)]
        rates = [map_target_fps(clip.fps, self._options.fps_max)[0] for clip in used]
        scored = self._options.motion_score
        texts = [
            add_caption_suffix(clip.text, rate, self._options.fps_max, clip.motion_score if scored else None)
            for clip, rate in zip(used, rates, strict=True)
        ]
        return BatchResult(
            number=task.number,
            video=video if task.as_tensor else video.numpy(),
            rows=tuple(clip.row for clip in used),
            texts=tuple(texts),
            fps=tuple(rates),
            motion_scores=tuple(clip.motion_score for clip in used),
            replaced=tuple(self._replaced),
            shortened=tuple(self._shortened),
        )

    def _fill(self, out: Tensor, clip: ClipSource, position: int) -> ClipSource:
        """Reads `clip`, or spares until one can be read, into `out` [3, T, H, W]; the one that was read."""
        failed: list[Failure] = []
        while True:
            if not clip.paths and self._options.names is not None:
                clip = self._options.names.name(clip)
            purpose = ("clip",) if not failed else ("clip", "replacement", clip.row)
            try:
                self._read_clip(out, clip, draw_parts=(self._options.seed, self._task.epoch, position, *purpose))
                return clip
            except (MediaError, OSError) as error:
                reason = error.reason if isinstance(error, MediaError) else str(error)
                failed.append(Failure(clip.row, _find(clip.paths), reason))
                self._replaced.append(failed[-1])
            if not self._spares:
                raise _no_spare_left(failed, self._task)
            clip = self._spares.pop()

    def _read_clip(self, out: Tensor, clip: ClipSource, draw_parts: Sequence[int | str]) -> None:
        path = _find(clip.paths)
        if not Path(path).exists():
            raise MediaError(path, "the file does not exist")
        if is_still(path):
            if self._task.frames != 1:
                raise MediaError(path, f"a still cannot give {self._task.frames} frames")
            out[:, 0] = resize_crop_image(read_frames(path, [0])[0], self._size)
            return
        try:
            frames = self._read_span(path, clip, clip.num_frames, draw_parts)
        except MediaError as error:
            held = self._held_frames(path, clip)
            if held is None:
                raise error
            frames = self._read_span(path, clip, held, draw_parts)
            reason = f"the table says {clip.num_frames} frames, the file holds {held}"
            self._shortened.append(Failure(clip.row, path, reason))
        out.copy_(resize_crop_uint8(torch.from_numpy(frames).permute(0, 3, 1, 2), self._size).transpose(0, 1))

    def _read_span(self, path: str, clip: ClipSource, total: int, draw_parts: Sequence[int | str]) -> NDArray[np.uint8]:
        """uint8 [T, H, W, 3]: the frames of a window drawn from the first `total` ones."""
        rng = draw_rng(*draw_parts)
        interval = map_target_fps(clip.fps, self._options.fps_max)[1]
        if self._options.rand_sample_interval is not None:
            interval = draw_interval(total, self._task.frames, self._options.rand_sample_interval, rng)
        try:
            indices = draw_frame_indices(total, self._task.frames, interval, rng)
        except DataError as error:
            raise MediaError(path, error.message) from None
        return read_frames(path, indices.tolist())

    def _held_frames(self, path: str, clip: ClipSource) -> int | None:
        """Frames of a file that holds fewer than the table says but enough for the bucket; else None."""
        held = probe(path).num_frames
        drawn = self._options.rand_sample_interval is not None
        interval = 1 if drawn else map_target_fps(clip.fps, self._options.fps_max)[1]
        return held if self._task.frames <= held // interval and held < clip.num_frames else None


def _find(paths: tuple[str, ...]) -> str:
    return next((path for path in paths if Path(path).exists()), paths[0])


def _no_spare_left(failed: Sequence[Failure], task: BatchTask) -> DataError:
    named = "; ".join(map(str, failed[:_SHOWN]))
    more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    bucket = f"{task.frames} frames of {task.width}x{task.height}"
    return DataError(
        f"no clip of the bucket {bucket} can be read in place of those that fail: {named}{more}",
        hint="look at these files, then run `osora data meta` over the table again",
    )
