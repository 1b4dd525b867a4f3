"""Which clips are reconstructed: rows of a table, files of a folder, one file; whole, or a bucket's window of each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from osora_cli.config.schema import ReconstructConfig
from osora_cli.data.buckets import Bucket, BucketTable
from osora_cli.data.crop import draw_frame_indices, draw_interval
from osora_cli.data.draws import draw_rng
from osora_cli.data.fps import map_target_fps
from osora_cli.data.media import STILL_EXTENSIONS, VIDEO_EXTENSIONS, MediaError, MediaInfo, is_still, probe, read_frames
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import resize_crop_image, resize_crop_uint8
from osora_cli.errors import ConfigError, DataError, OsoraError
from osora_cli.words import counted

_NAME_LENGTH = 100  # characters: leaves room for endings where a file system allows 255 bytes of UTF-8
_MEDIA = STILL_EXTENSIONS | VIDEO_EXTENSIONS


@dataclass(frozen=True)
class LeftOut:
    """A clip that was not reconstructed, and why."""

    row: int
    path: str
    reason: str


@dataclass(frozen=True)
class ClipPlan:
    """One clip to reconstruct.

    Attributes:
        name: of its files in orig/ and recn/, without ending; no other clip has it.
        row: of the table, or place in the folder's listing, from 0.
        path: as written in the table.
        file: the file.
        indices: frames of the file, in order.
        size: height and width that the net is given, pixels.
        resized: whether `size` is a bucket's, not the file's own.
        fps: frames a second of `indices`; nan for a still.
        still: the file is a still.
    """

    name: str
    row: int
    path: str
    file: Path
    indices: NDArray[np.int64]
    size: tuple[int, int]
    resized: bool
    fps: float
    still: bool

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Frames start..stop of the plan, uint8 `[T, 3, H, W]`. Raises MediaError."""
        pixels = read_frames(self.file, self.indices[start:stop].tolist())
        if self.resized and self.still:
            return resize_crop_image(pixels[0], self.size)[None]
        frames = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        return resize_crop_uint8(frames, self.size) if self.resized else frames


class ClipRows(Protocol):
    """The input as rows: what is written there, where the files are, and what is known of them.

    `usable` are the rows that can be asked for; the others are in `left_out`.
    """

    source: str
    kind: str
    digest: str
    paths: Sequence[str]
    usable: Sequence[int]
    num_frames: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    fps: NDArray[np.float64]
    left_out: list[LeftOut]

    def file(self, row: int) -> Path:
        """The file of a row. Raises DataError where it does not exist."""


@dataclass
class TableRows:
    """The rows of a clip table."""

    table: ClipTable
    kind: str = "table"
    left_out: list[LeftOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source, self.digest = str(self.table.source), self.table.digest
        self.paths: Sequence[str] = [str(path) for path in self.table.path.to_pylist()]
        self.usable: Sequence[int] = range(len(self.table))
        self.num_frames, self.height = self.table.num_frames, self.table.height
        self.width, self.fps = self.table.width, self.table.fps

    def file(self, row: int) -> Path:
        return self.table.resolve(row)


@dataclass
class FileRows:
    """Files of a folder, in the order of their paths, or one file. Those that cannot be opened are left out."""

    source: str
    kind: str
    files: list[Path]
    left_out: list[LeftOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        infos = [self._probe(row, file) for row, file in enumerate(self.files)]
        bad = {clip.row for clip in self.left_out}
        self.paths: Sequence[str] = [str(file) for file in self.files]
        self.usable: Sequence[int] = [row for row in range(len(self.files)) if row not in bad]
        self.num_frames = np.array([i.num_frames for i in infos], dtype=np.int64)
        self.height = np.array([i.height for i in infos], dtype=np.int64)
        self.width = np.array([i.width for i in infos], dtype=np.int64)
        self.fps = np.array([i.fps for i in infos], dtype=np.float64)
        # Below the folder, so that the same files elsewhere have the same digest.
        names = [os.path.relpath(file, self.source) for file in self.files]
        facts = [(names[row], *astuple(infos[row])) for row in self.usable]
        self.digest = xxhash.xxh3_128_hexdigest(repr(facts).encode("utf-8", "surrogatepass"))

    def _probe(self, row: int, file: Path) -> MediaInfo:
        try:
            return probe(file)
        except MediaError as error:
            self.left_out.append(LeftOut(row, str(file), error.reason))
            return MediaInfo.still(1, 1)

    def file(self, row: int) -> Path:
        return self.files[row]


def open_rows(config: ReconstructConfig) -> ClipRows:
    """The clips that `dataset.data_path` names: a table, a folder of videos and stills, or one of them.

    Raises:
        ConfigError: no path is given.
        DataError: nothing is there, or the table cannot be used.
    """
    given = config.dataset.data_path
    if given is None:
        raise ConfigError(
            "no clips are given",
            where="dataset.data_path",
            hint="--dataset.data-path TABLE.csv, or a folder of videos, or one video",
        )
    path = Path(given).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _MEDIA and p.is_file())
        if not files:
            raise DataError(f"the folder `{given}` holds no video and no still", allowed=", ".join(sorted(_MEDIA)))
        return FileRows(str(path), "folder", files)
    if path.is_file() and path.suffix.lower() in _MEDIA:
        return FileRows(str(path), "file", [path])
    return TableRows(ClipTable.load(given, config.dataset.root))


@dataclass
class Selection:
    """The rows to reconstruct and the plan of each, made when it is asked for.

    Attributes:
        rows: in the order of work: with buckets, those of one shape follow each other.
        left_out: rows that were considered and are not among them; plans that fail are added.
    """

    source: ClipRows
    config: ReconstructConfig
    rows: list[int]
    left_out: list[LeftOut]
    _names: dict[int, str]
    _buckets: dict[int, Bucket]

    def plans(self) -> Iterator[ClipPlan]:
        """The plans of all rows whose files can be opened."""
        for row in self.rows:
            try:
                yield self._plan(row)
            except DataError as error:
                self.left_out.append(LeftOut(row, self.source.paths[row], reason_of(error)))

    def cost(self, row: int) -> float:
        """How much work a row is, in pixels over all frames, as far as the table knows."""
        bucket = self._buckets.get(row)
        if bucket is not None:
            return bucket.frames * bucket.height * bucket.width
        return float(self.source.num_frames[row]) * float(self.source.height[row]) * float(self.source.width[row])

    def _plan(self, row: int) -> ClipPlan:
        file, path = self.source.file(row), self.source.paths[row]
        still = is_still(file)
        bucket = self._buckets.get(row)
        if bucket is None:
            # Not the table's numbers: what goes out is what the file holds.
            info = probe(file)
            indices, size, fps = np.arange(info.num_frames), (info.height, info.width), info.fps
        else:
            indices, fps = self._window(row, bucket.frames)
            size = (bucket.height, bucket.width)
        return ClipPlan(self._names[row], row, path, file, indices, size, bucket is not None, fps, still)

    def _window(self, row: int, frames: int) -> tuple[NDArray[np.int64], float]:
        """Frames of the bucket's window, drawn by seed and row alone, and their rate."""
        dataset, total, fps = self.config.dataset, int(self.source.num_frames[row]), float(self.source.fps[row])
        rng = draw_rng(self.config.seed, "reconstruct", row)
        interval = map_target_fps(fps, dataset.fps_max)[1]
        if dataset.rand_sample_interval is not None:
            interval = draw_interval(total, frames, dataset.rand_sample_interval, rng)
        return draw_frame_indices(total, frames, interval, rng), fps / interval


def select(rows: ClipRows, config: ReconstructConfig, spatial_compression: int) -> Selection:
    """The first `num_samples` rows, of those that a bucket takes where the config has buckets.

    Raises:
        DataError: no row is left.
    """
    left_out = list(rows.left_out)
    chosen = list(rows.usable)
    buckets: dict[int, Bucket] = {}
    if config.bucket_config:
        table = BucketTable(config.bucket_config, spatial_compression)
        fps_max = config.dataset.fps_max
        ids = table.assign(rows.num_frames, rows.height, rows.width, rows.fps, fps_max=fps_max, seed=config.seed)
        buckets = {row: table.buckets[ids[row]] for row in rows.usable if ids[row] >= 0}
        limit = config.num_samples or len(chosen)
        chosen = list(buckets)[:limit]
        considered = chosen[-1] + 1 if chosen and len(chosen) == limit else len(rows.paths)
        for row in (r for r in rows.usable if r < considered and r not in buckets):
            facts = (int(rows.num_frames[row]), int(rows.height[row]), int(rows.width[row]), float(rows.fps[row]))
            left_out.append(LeftOut(row, rows.paths[row], "in no bucket: " + table.explain(*facts, fps_max=fps_max)))
        chosen.sort(key=lambda row: int(ids[row]))
    elif config.num_samples is not None:
        chosen = chosen[: config.num_samples]
    if not chosen:
        raise none_usable(left_out, rows.source)
    names = dict(zip(sorted(chosen), unique_names([rows.paths[row] for row in sorted(chosen)]), strict=True))
    return Selection(rows, config, chosen, left_out, names, buckets)


def none_usable(left_out: Sequence[LeftOut], source: str) -> DataError:
    """No clip could be used: the first few, and why."""
    shown = "; ".join(f"`{clip.path}` (row {clip.row}): {clip.reason}" for clip in left_out[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    none = f"none of {counted(len(left_out), 'clip')} can be reconstructed: {shown}{more}"
    return DataError(
        none if left_out else "there is no clip",
        where=source,
        hint="`osora data meta` over the table tells which files can be read; "
        "an empty `bucket_config` takes every clip whole, as it is",
    )


def reason_of(error: OsoraError) -> str:
    return error.reason if isinstance(error, MediaError) else error.message


def unique_names(paths: Sequence[str]) -> list[str]:
    """A file name without ending for each path: its stem, letters and digits of any script, `-`, `_` and `.` only.

    Names that would be equal, also where a file system ignores the case of letters, get a number.
    """
    names: list[str] = []
    taken: set[str] = set()
    for path in paths:
        stem = re.sub(r"[^\w.-]+", "_", Path(path).stem).strip("._-")[:_NAME_LENGTH] or "clip"
        name, number = stem, 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name.casefold())
        names.append(name)
    return names
