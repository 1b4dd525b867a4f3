"""Batches from a cache, in the order in which training reads the clips themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from osora_cli.app.cache.clips import ClipCache
from osora_cli.app.feed import TableFeed
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.data.cache import WHOLE, ClipShape
from osora_cli.data.cached_batch import CachedBatch, Part
from osora_cli.data.draws import draw_rng
from osora_cli.data.fps import map_target_fps
from osora_cli.data.loader import ClipBatch
from osora_cli.data.plan import Batch
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError
from osora_cli.model.latents import TextBundle

_AHEAD = 2


class CachedFeed(TableFeed):
    """A table's batches with latents, text embeddings, or both from a cache.

    Which clips come when is the sampler's affair, as without a cache; only their windows are the cache's, the next of
    them each epoch. A clip that could not be read when the cache was made is replaced by another of its bucket.

    Args:
        cache: of this table and config.

    Raises:
        DataError: the cache lacks clips or captions of the first epoch. Later epochs are looked at when they begin.
    """

    def __init__(
        self,
        table: ClipTable,
        sampler: BucketSampler,
        config: TrainDiffusionConfig,
        start: Position,
        cache: ClipCache,
        *,
        pin_memory: bool,
    ) -> None:
        super().__init__(table, sampler, config, start, pin_memory=pin_memory)
        self._table, self._cache, self._config = table, cache, config
        self._pin = pin_memory and torch.cuda.is_available()
        self._checked: set[int] = set()
        self._check(start.epoch)

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        self._check(epoch)
        if not self._config.cached_video:
            return (self._with_text(batch, {}) for batch in super().batches(epoch, step))
        return self._from_cache(epoch, step)

    def _from_cache(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        """Batches read a little ahead, by one thread."""
        plan = self._plan(epoch)[step - self._done_before(epoch) :]
        with ThreadPoolExecutor(1, "cache") as reader:
            waiting = [reader.submit(self._read, plan[n], epoch) for n in range(min(_AHEAD, len(plan)))]
            for number in range(len(plan)):
                began = time.perf_counter()
                values = waiting.pop(0).result()
                if number + _AHEAD < len(plan):
                    waiting.append(reader.submit(self._read, plan[number + _AHEAD], epoch))
                yield CachedBatch(**values, wait_s=time.perf_counter() - began)

    def _read(self, batch: Batch, epoch: int) -> dict[str, Any]:
        shape, window = ClipShape(batch.frames, batch.height, batch.width), epoch % self._cache.windows
        rows, replaced = self._rows(batch, shape, epoch)
        read: list[dict[Part, torch.Tensor]] = []
        for row in rows:
            keys = self._cache.found(row, shape, window)
            assert keys is not None, "looked at when the epoch began"
            read.append(self._cache.read_latent(keys))
        stacked = {part: self._host(torch.stack([one[part] for one in read])) for part in read[0]}
        scores, limit = self._table.score_vmafmotion, self._config.dataset.fps_max
        texts = tuple(self._cache.caption(row) for row in rows)
        return {
            "video": torch.empty((len(rows), 3, *shape), dtype=torch.uint8, device="meta"),
            "rows": tuple(rows),
            "positions": batch.positions,
            "texts": texts,
            "fps": tuple(map_target_fps(float(self._table.fps[row]), limit)[0] for row in rows),
            "motion_scores": tuple(float("nan") if scores is None else float(scores[row]) for row in rows),
            "replaced": tuple(replaced),
            "shortened": (),
            "latents": stacked.pop(WHOLE),
            "parts": stacked,
            **self._text_values(texts),
        }

    def _rows(self, batch: Batch, shape: ClipShape, epoch: int) -> tuple[list[int], list[tuple[int, str]]]:
        """The batch's rows, those apart that are in the cache as unreadable: others of the bucket for them."""
        window = epoch % self._cache.windows
        rows, replaced = list(batch.rows), list[tuple[int, str]]()
        members = [int(row) for row in batch.members if int(row) not in batch.rows]
        draw_rng(self._config.seed, epoch, batch.positions[0], "spares").shuffle(members)
        for place, row in enumerate(batch.rows):
            if self._cache.found(row, shape, window) is not None:
                continue
            path = self._table.path_of(row)
            spare = next((member for member in members if self._cache.found(member, shape, window) is not None), None)
            reason = self._cache.unreadable.get(path, "it is not in the cache")
            if spare is None:
                raise DataError(f"no clip of the bucket can stand for `{path}` (row {row}): {reason}")
            members.remove(spare)
            rows[place] = spare
            replaced.append((row, f"`{path}`: {reason}"))
        return rows, replaced

    def _with_text(self, batch: ClipBatch, values: dict[str, Any]) -> CachedBatch:
        held = {one.name: getattr(batch, one.name) for one in fields(ClipBatch)}
        return CachedBatch(**{**held, **values, **self._text_values(batch.texts)})

    def _text_values(self, texts: tuple[str, ...]) -> dict[str, Any]:
        if not self._config.cached_text:
            return {}
        bundle = self._cache.read_texts(texts)
        return {"t5": self._host(bundle.t5), "clip": self._host(bundle.clip)}

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pin else tensor

    def _check(self, epoch: int) -> None:
        """Whether all that this epoch wants is there."""
        if epoch not in self._checked:
            require_epoch(self._cache, self._sampler, self._config, epoch)
            self._checked.add(epoch)


def require_epoch(cache: ClipCache, sampler: BucketSampler, config: TrainDiffusionConfig, epoch: int) -> None:
    """Raises DataError if the cache lacks clips or captions of an epoch: which, and what makes them."""
    # All rows in buckets, not this rank's alone: every rank then says the same, and spares are there.
    buckets, ids = sampler.table.buckets, sampler.bucket_ids(epoch)
    clips = [
        (row, ClipShape(bucket.frames, bucket.height, bucket.width))
        for row in np.flatnonzero(ids >= 0).tolist()
        for bucket in (buckets[int(ids[row])],)
    ]
    if config.cached_video:
        cache.require_clips(clips, epoch % cache.windows)
    if config.cached_text:
        cache.require_texts(["", *(cache.caption(row) for row, _ in clips)])


def open_cache(table: ClipTable, config: TrainDiffusionConfig) -> ClipCache | None:
    """The cache that a training reads from; None where it reads from none.

    Raises:
        OsoraError: the networks that it should be of cannot be found.
    """
    if not config.cached_video and not config.cached_text:
        return None
    return ClipCache(table, config, video=config.cached_video, text=config.cached_text)


def null_from_cache(cache: ClipCache | None, config: TrainDiffusionConfig) -> TextBundle | None:
    """The empty text's embedding where texts are cached. Raises DataError where it is not in the cache."""
    return cache.null_text() if cache is not None and config.cached_text else None
