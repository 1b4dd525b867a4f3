"""Which clip goes into which bucket: a frame size, a number of frames and a batch size.

`bucket_config` is `{resolution: {frames: (probability, batch size)}}`; instead of the probability there may be a pair
(of using the size, of going on to a shorter length). Rules and order of draws: algorithms, part 6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from osora_cli.data.aspect import Resolution, closest_ratios, resolve_resolution
from osora_cli.data.fps import frame_intervals
from osora_cli.data.seeded_uniform import SeededUniform
from osora_cli.errors import ConfigError
from osora_cli.words import counted

# A clip must have at least this share of a resolution's pixels.
MIN_AREA = 0.8
# Clips handled at once: bounds the memory of the draws, and keeps their arrays in the processor's cache.
_CHUNK = 1 << 16
_MAX_SEED = 1 << 64

Probability = float | tuple[float, float]


class Bucket(NamedTuple):
    """One shape of batch. Height and width in pixels; `ratio` is the name width:height."""

    resolution: str
    frames: int
    ratio: str
    height: int
    width: int
    batch_size: int

    @property
    def pixels(self) -> int:
        """Of a batch over all its frames: what the time of a step goes with."""
        return self.batch_size * self.frames * self.height * self.width


class LeftOut(IntEnum):
    """Why a clip is in no bucket."""

    TOO_SMALL = 1
    TOO_SHORT = 2
    NO_STILLS = 3
    PROBABILITY = 4


class _Length(NamedTuple):
    frames: int
    size_probability: float
    skip_probability: float | None  # of going on to the next shorter length, where given
    first_bucket: int  # the buckets of its aspect ratios follow one another from here


class _Level(NamedTuple):
    name: str
    resolution: Resolution
    still: _Length | None
    videos: tuple[_Length, ...]  # longest first

    @property
    def min_area(self) -> float:
        return MIN_AREA * self.resolution.pixels


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_entry(where: str, frames: Any, entry: Any) -> tuple[Probability, int]:
    """(probability or pair, batch size) of one entry, checked."""
    allowed = "`{frames: [probability, batch size]}`, probabilities from 0 to 1, batch size at least 1"
    if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
        raise ConfigError(f"{where}: `{frames}` is not a number of frames", allowed=allowed)
    where = f"{where}: {frames}"
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
        raise ConfigError(f"{where}: `{entry}` is not a pair", allowed=allowed)
    chance, batch_size = entry
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"{where}: `{batch_size}` is not a batch size", allowed=allowed)
    pair = isinstance(chance, Sequence) and not isinstance(chance, str)
    values = list(chance) if pair else [chance]
    if len(values) != (2 if pair else 1) or not all(_is_number(v) and 0 <= v <= 1 for v in values):
        raise ConfigError(f"{where}: `{chance}` is not a probability", allowed=allowed)
    if pair:
        return (float(values[0]), float(values[1])), batch_size
    return float(values[0]), batch_size


class BucketTable:
    """The buckets of a `bucket_config`, and the assignment of clips to them.

    Attributes:
        buckets: every bucket: resolutions with the most pixels first, in each the longest first, in each the aspect
            ratios in their table's order. Its length is what the seed of a clip is spaced by.

    Args:
        bucket_config: `{resolution: {frames: (probability, batch size)}}`.
        spatial_compression: what height and width of the buckets are multiples of.

    Raises:
        ConfigError: no resolution at all, or one that does not exist, or an entry of another form.
    """

    def __init__(self, bucket_config: Mapping[str, Mapping[int, Any]], spatial_compression: int) -> None:
        if not any(bucket_config.values()):
            raise ConfigError(
                "`bucket_config` has no bucket",
                hint='name one, as in `--bucket_config \'{"256px": {"33": [1.0, 1]}}\'`',
            )
        self.spatial_compression = spatial_compression
        self.buckets: list[Bucket] = []
        resolutions = {name: resolve_resolution(name, spatial_compression) for name in bucket_config}
        # sorted() keeps the config's order among resolutions of equally many pixels, also in reverse.
        order = sorted(bucket_config, key=lambda name: resolutions[name].pixels, reverse=True)
        self._canonical: list[Any] = []
        self._levels = [self._add_level(name, resolutions[name], bucket_config[name]) for name in order]

    def _add_level(self, name: str, resolution: Resolution, lengths: Mapping[int, Any]) -> _Level:
        entries = {frames: _check_entry(f"bucket_config: {name}", frames, lengths[frames]) for frames in lengths}
        built = []
        for frames in sorted(entries, reverse=True):
            chance, batch_size = entries[frames]
            size_probability, skip_probability = chance if isinstance(chance, tuple) else (chance, None)
            built.append(_Length(frames, size_probability, skip_probability, len(self.buckets)))
            self.buckets += [
                Bucket(name, frames, ratio, height, width, batch_size)
                for ratio, (height, width) in resolution.sizes.items()
            ]
            self._canonical.append([name, frames, chance, batch_size])
        still = next((length for length in built if length.frames == 1), None)
        return _Level(name, resolution, still, tuple(length for length in built if length.frames != 1))

    def __len__(self) -> int:
        return len(self.buckets)

    def digest(self) -> str:
        """A digest of everything the assignment depends on: order of resolutions, lengths, probabilities, sizes."""
        text = json.dumps([self._canonical, self.spatial_compression, [list(b) for b in self.buckets]])
        return xxhash.xxh3_128_hexdigest(text.encode())

    def assign(
        self,
        num_frames: NDArray[np.int64],
        height: NDArray[np.int64],
        width: NDArray[np.int64],
        fps: NDArray[np.float64],
        *,
        fps_max: float | None,
        seed: int,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int32]:
        """The bucket of every clip, as its place in `buckets`; -1: in none.

        Args:
            num_frames, height, width, fps: of the clips, [N] each.
            fps_max: largest rate wanted, frames a second.
            seed: the sampler's seed plus the epoch. The clip in row i draws from a generator with the seed
                `seed + i * len(self)`, and only where a probability is below 1.
            rows: rows of the clips; None: 0 to N - 1.
        """
        count = len(num_frames)
        rows = np.arange(count) if rows is None else rows
        last = seed + int(rows.max(initial=0)) * len(self)
        if seed < 0 or last >= _MAX_SEED:
            raise ConfigError(f"seed `{seed}` is too large or below 0", allowed="0 to 2^63 - 1")
        used = num_frames // frame_intervals(fps, fps_max)
        area = height * width
        out = np.full(count, -1, dtype=np.int32)
        for begin in range(0, count, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            with np.errstate(over="ignore"):
                seeds = np.uint64(seed) + rows[part].astype(np.uint64) * np.uint64(len(self))
            chunk = _Chunk(self._levels, used[part], area[part], seeds)
            chunk.assign()
            hit = np.flatnonzero(chunk.first_bucket >= 0)
            self._add_ratio(chunk, hit, height[part][hit] / width[part][hit], out[part])
        return out

    def _add_ratio(
        self, chunk: _Chunk, hit: NDArray[np.intp], ratios: NDArray[np.float64], out: NDArray[np.int32]
    ) -> None:
        for place, level in enumerate(self._levels):
            here = chunk.level[hit] == place
            index = hit[here]
            out[index] = chunk.first_bucket[index] + closest_ratios(ratios[here], level.resolution.sizes)

    def left_out(
        self,
        bucket_ids: NDArray[np.int32],
        num_frames: NDArray[np.int64],
        height: NDArray[np.int64],
        width: NDArray[np.int64],
        fps: NDArray[np.float64],
        *,
        fps_max: float | None,
    ) -> NDArray[np.int8]:
        """Why each clip is in no bucket (`LeftOut`); 0: it is in one. `bucket_ids` is what `assign` returned, [N]."""
        used = num_frames // frame_intervals(fps, fps_max)
        area = height * width
        reason = np.full(len(area), LeftOut.TOO_SMALL, dtype=np.int8)
        for level in self._levels:
            big = area >= level.min_area
            still = big & (used == 1)
            reason[still & (reason == LeftOut.TOO_SMALL)] = LeftOut.NO_STILLS
            video = big & (used != 1)
            reason[video & (reason == LeftOut.TOO_SMALL)] = LeftOut.TOO_SHORT
            if level.still is not None:
                reason[still] = LeftOut.PROBABILITY
            if level.videos:
                reason[video & (used >= level.videos[-1].frames)] = LeftOut.PROBABILITY
        reason[bucket_ids >= 0] = 0
        return reason

    def explain(self, num_frames: int, height: int, width: int, fps: float, *, fps_max: float | None) -> str:
        """One clip's way past the buckets in words: its frames, how many are used, and what each resolution asks."""
        interval = int(frame_intervals(np.array([fps], dtype=np.float64), fps_max)[0])
        used = num_frames // interval
        facts = counted(num_frames, "frame")
        if interval > 1:
            facts += f" at {fps:g} fps, used every {interval} frames (fps_max {fps_max:g}): {counted(used, 'frame')}"
        facts += f", {width}x{height}"
        return "; ".join([facts, *(self._explain_level(level, used, height * width) for level in self._levels)])

    @staticmethod
    def _explain_level(level: _Level, used: int, area: int) -> str:
        if area < level.min_area:
            return f"`{level.name}` needs {int(np.ceil(level.min_area))} pixels, it has {area}"
        if used == 1:
            return f"`{level.name}` " + ("draws by probability" if level.still else "takes no single frames")
        shortest = level.videos[-1].frames if level.videos else None
        if shortest is None:
            return f"`{level.name}` takes single frames only"
        if used < shortest:
            return f"`{level.name}` needs {counted(shortest, 'frame')}, it has {used}"
        return f"`{level.name}` draws by probability"


class _Chunk:
    """The assignment of some clips: which level and length each falls to. Numbers are drawn where a rule needs one."""

    def __init__(
        self, levels: Sequence[_Level], used: NDArray[np.int64], area: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> None:
        self._levels, self._used, self._area, self._seeds = levels, used, area, seeds
        self._uniform: SeededUniform | None = None
        self.level = np.full(len(used), -1, dtype=np.int16)
        self.first_bucket = np.full(len(used), -1, dtype=np.int32)

    def _below(self, index: NDArray[np.intp], probability: float, or_equal: bool) -> NDArray[np.bool_]:
        """For each clip whether the next number of its generator is below `probability`."""
        if not index.size:
            return np.empty(0, dtype=np.bool_)
        if self._uniform is None:
            self._uniform = SeededUniform(self._seeds)
        drawn = self._uniform.random(index)
        return drawn <= probability if or_equal else drawn < probability

    def assign(self) -> None:
        undecided = np.arange(len(self._used))
        for place, level in enumerate(self._levels):
            big = undecided[self._area[undecided] >= level.min_area]
            single = self._used[big] == 1
            if level.still is not None:
                self._assign_stills(place, level.still, big[single])
            self._assign_videos(place, level, big[~single])
            undecided = undecided[self.first_bucket[undecided] < 0]

    def _take(self, place: int, length: _Length, index: NDArray[np.intp]) -> None:
        self.level[index] = place
        self.first_bucket[index] = length.first_bucket

    def _assign_stills(self, place: int, length: _Length, index: NDArray[np.intp]) -> None:
        # A still's probability may be a pair as well: then its first number counts.
        if length.size_probability < 1:
            index = index[self._below(index, length.size_probability, or_equal=False)]
        self._take(place, length, index)

    def _assign_videos(self, place: int, level: _Level, pending: NDArray[np.intp]) -> None:
        for length in level.videos:
            fits = self._used[pending] >= length.frames
            if length.skip_probability is not None:
                if length.skip_probability >= 1:
                    continue
                candidates = np.flatnonzero(fits)
                fits[candidates] = ~self._below(pending[candidates], length.skip_probability, or_equal=True)
            here = pending[fits]
            # One that is not taken here does not go on to a shorter length but to the next lower resolution.
            pending = pending[~fits]
            if length.size_probability < 1:
                here = here[self._below(here, length.size_probability, or_equal=True)]
            self._take(place, length, here)
            if not pending.size:
                return
