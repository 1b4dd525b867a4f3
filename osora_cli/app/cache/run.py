"""`osora data cache`: latents and text embeddings of a table, made once and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from osora_cli.app.cache.clips import LATENTS, TEXTS, UNREADABLE, ClipCache, cache_folder
from osora_cli.app.cache.plan import Ranks, clip_shapes, compute_device, epochs_needed
from osora_cli.app.data.input import check_buckets, load_table, make_sampler
from osora_cli.app.frozen_parts import build_frozen_parts, resolve_autoencoder
from osora_cli.config.diffusion import TrainDiffusionConfig, check_parts
from osora_cli.data.cache import CACHE_SEED, WHOLE, ClipShape, FileIdentity, clip_position
from osora_cli.data.cache_store import Store, StoreWriter, cannot_write, remove_unfinished
from osora_cli.data.cached_batch import Part
from osora_cli.data.clip_reader import Failure
from osora_cli.data.draws import draw_seed
from osora_cli.data.failures import FailureLimit
from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.transforms import normalize
from osora_cli.errors import DataError
from osora_cli.model.latents import FrozenParts, embed_texts, encode_latents
from osora_cli.tensors import DTYPES
from osora_cli.trainer.conditions import PixelParts

SCHEMA_VERSION = 1
# Clips whose files are looked at, and captions that are embedded, at a time.
_CHUNK = 128
_TEXTS_AT_ONCE = 16
_READERS = 8
# A process that is killed loses what it has not written; so it writes now and then, also shards that are not full.
_FLUSH_SECONDS = 120.0


class Progress(Protocol):
    """Told how far a command has come."""

    def __call__(self, done: int, total: int | None = None, /) -> None: ...


def _silent(done: int, total: int | None = None, /) -> None:
    del done, total


class _Window(NamedTuple):
    """One window of one clip that has to be made, and the keys of its parts."""

    row: int
    clip: FileIdentity
    shape: ClipShape
    window: int
    keys: dict[Part, str]


@dataclass
class CacheResult:
    """What this process made of its share.

    Attributes:
        folder: the cache's.
        clips, captions: of this process's share; a clip counts once for each window and shape.
        clips_made, captions_made: those that were not there yet.
        unreadable: path and reason of clips that could not be read, and are not in the cache.
        damaged: shards that could not be read and were removed, with the reason.
        bytes: of the tensors that were made.
        ranks: processes that shared the work.
    """

    folder: Path
    clips: int = 0
    clips_made: int = 0
    captions: int = 0
    captions_made: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bytes: int = 0
    ranks: int = 1
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "cache": str(self.folder),
            "clips": self.clips,
            "clips_made": self.clips_made,
            "captions": self.captions,
            "captions_made": self.captions_made,
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable.items()],
            "damaged": [{"shard": shard, "reason": reason} for shard, reason in self.damaged.items()],
            "bytes": self.bytes,
            "ranks": self.ranks,
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }


def make_cache(
    config: TrainDiffusionConfig,
    *,
    clips: Progress | None = None,
    captions: Progress | None = None,
    ranks: Ranks | None = None,
    shard_bytes: int = 256 << 20,
) -> CacheResult:
    """Make what the cache of a config's table lacks. May be killed at any time, and called again.

    Args:
        clips, captions: told how many are done.
        ranks: this process and how many share the work; None: as the environment says.
        shard_bytes: tensors of a shard.

    Raises:
        ConfigError: the config asks for what its autoencoder cannot do.
        DataError: the table cannot be used, or more clips than `max_bad_fraction` cannot be read.
        SetupError: the folder cannot be written to, or weights are not there.
    """
    began = time.perf_counter()
    ranks = ranks or Ranks.of_environment()
    resolved = resolve_autoencoder(config)
    config = resolved.config
    table = load_table(config.dataset)
    check_buckets(config)
    check_parts(config)
    sampler = make_sampler(table, config)
    pairs = clip_shapes(sampler, epochs_needed(config, sampler))
    if not pairs:
        raise DataError(f"no clip of table `{table.source}` is in a bucket", where="bucket_config")
    notes = [*table.notes, *resolved.notes]
    device = compute_device(config, ranks)
    parts = build_frozen_parts(config, device, DTYPES[config.dtype], notes=notes)
    _make_folder(cache_folder(config))
    cache = ClipCache(table, config, parts=parts)
    maker = _Maker(config, cache, parts, device, ranks, shard_bytes, clips or _silent, captions or _silent)
    maker.result.notes = notes
    maker.make(pairs)
    maker.result.seconds = time.perf_counter() - began
    return maker.result


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


class _Maker:
    def __init__(
        self,
        config: TrainDiffusionConfig,
        cache: ClipCache,
        parts: FrozenParts,
        device: torch.device,
        ranks: Ranks,
        shard_bytes: int,
        clips: Progress,
        captions: Progress,
    ) -> None:
        self._config, self._cache, self._parts = config, cache, parts
        self._device, self._ranks, self._clips, self._captions = device, ranks, clips, captions
        self._shard_bytes, self._written = shard_bytes, time.monotonic()
        self.result = CacheResult(cache.folder, ranks=ranks.world_size)

    def make(self, pairs: Sequence[tuple[int, ClipShape]]) -> None:
        self._remove_damaged()
        texts = self._texts_of(dict.fromkeys(row for row, _ in pairs))
        clips = [(row, shape, w) for row, shape in pairs for w in range(self._cache.windows)]
        mine = clips[self._ranks.rank :: self._ranks.world_size]
        self.result.clips, self.result.captions = len(mine), len(texts)
        self._make_texts(texts)
        self._make_latents(mine)
        self._write_unreadable()
        for name in (LATENTS, TEXTS):
            folder = self._cache.folder / name
            if self._ranks.rank == 0:
                remove_unfinished(folder, self._ranks.world_size)
            Store.open(folder).write_index()

    def _remove_damaged(self) -> None:
        for name, store in ((LATENTS, self._cache.latents), (TEXTS, self._cache.texts)):
            for shard, reason in store.damaged.items():
                (self._cache.folder / name / shard).unlink(missing_ok=True)
                self.result.damaged[f"{name}/{shard}"] = reason

    # -- texts ------------------------------------------------------------------------------------------------------

    def _texts_of(self, rows: dict[int, None]) -> list[str]:
        """This process's captions, each once; the empty one, which stands for no text, is among all of them."""
        captions = dict.fromkeys(["", *(self._cache.caption(row) for row in rows)])
        keyed = sorted((self._cache.text_key(text), text) for text in captions)
        return [text for _, text in keyed][self._ranks.rank :: self._ranks.world_size]

    def _make_texts(self, texts: Sequence[str]) -> None:
        cache = self._cache
        writer = StoreWriter(cache.folder / TEXTS, rank=self._ranks.rank, max_bytes=self._shard_bytes)
        missing = [text for text in texts if cache.text_key(text) not in cache.texts]
        for begin in range(0, len(missing), _TEXTS_AT_ONCE):
            chosen = missing[begin : begin + _TEXTS_AT_ONCE]
            made = embed_texts(self._parts, chosen).to("cpu")
            for number, text in enumerate(chosen):
                tensors = {"t5": made.t5[number], "clip": made.clip[number]}
                self._add(writer, cache.text_key(text), tensors, {"text": text, "model": cache.text_digest})
            self.result.captions_made += len(chosen)
            self._captions(self.result.captions_made, len(missing))
        writer.flush()

    # -- latents ----------------------------------------------------------------------------------------------------

    def _make_latents(self, clips: Sequence[tuple[int, ClipShape, int]]) -> None:
        config, folder = self._config, self._cache.folder
        writer = StoreWriter(folder / LATENTS, rank=self._ranks.rank, max_bytes=self._shard_bytes)
        limit = FailureLimit(config.dataset.max_bad_fraction, len(clips))
        loader = ClipLoader(
            self._cache.table,
            seed=CACHE_SEED,
            fps_max=config.dataset.fps_max,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            rand_sample_interval=config.dataset.rand_sample_interval,
            pin_memory=self._device.type == "cuda",
        )
        try:
            with ThreadPoolExecutor(_READERS, "identify") as pool:
                for begin in range(0, len(clips), _CHUNK):
                    chunk = clips[begin : begin + _CHUNK]
                    wanted = self._missing(chunk, pool, limit)
                    done = begin + len(chunk) - len(wanted)
                    for number, (window, batch) in enumerate(self._read(loader, wanted, limit), 1):
                        self._encode(writer, window, batch)
                        self.result.clips_made += 1
                        self._clips(done + number, len(clips))
                    self._clips(begin + len(chunk), len(clips))
        finally:
            loader.close()
            # What is made is kept, also when the clips after it end the work.
            writer.flush()
            self._write_unreadable()

    def _missing(
        self, chunk: Sequence[tuple[int, ClipShape, int]], pool: ThreadPoolExecutor, limit: FailureLimit
    ) -> list[_Window]:
        """The windows that are not in the cache, in order of their number; files are read for their digests."""
        rows = list(dict.fromkeys(row for row, _, _ in chunk))
        reasons = dict(zip(rows, pool.map(self._identify, rows), strict=True))
        out = []
        for row, shape, window in chunk:
            clip = None if reasons[row] else self._cache.identity(row)
            if clip is None:
                self._failed(row, reasons[row] or "the file does not exist", limit)
                continue
            keys = self._cache.latent_keys(row, clip, shape, window)
            lacking = {part: key for part, key in keys.items() if key not in self._cache.latents}
            if lacking:
                out.append(_Window(row, clip, shape, window, lacking))
            limit.add(1, [])
        return sorted(out, key=lambda one: one.window)

    def _identify(self, row: int) -> str:
        """Why a row's file cannot be looked at; empty where it can. Runs in a thread."""
        try:
            self._cache.identity(row)
        except OSError as error:
            return str(error)
        return ""

    def _read(
        self, loader: ClipLoader, wanted: Sequence[_Window], limit: FailureLimit
    ) -> Iterator[tuple[_Window, ClipBatch]]:
        """Each window's pixels. One clip a batch: so a clip's latent is the same whatever is made beside it."""
        for number, same in groupby(wanted, key=lambda one: one.window):
            left = list(same)
            while left:
                batches = [_batch(one) for one in left]
                try:
                    for batch in loader.read(batches, number):
                        yield left[0], batch
                        left.pop(0)
                except DataError as error:
                    # The loader ends at a clip that it cannot replace; the others are read on.
                    self._failed(left.pop(0).row, error.message, limit)

    @torch.no_grad()
    def _encode(self, writer: StoreWriter, wanted: _Window, batch: ClipBatch) -> None:
        assert self._parts.ae is not None
        ae, video = self._parts.ae, normalize(batch.video.to(self._device, non_blocking=True))

        def encode(part: Part, pixels: torch.Tensor) -> torch.Tensor:
            # On the CPU, by the key: a posterior's draw is the same on every device, and in every process.
            seed = draw_seed("posterior", wanted.keys[part]) % 2**63
            return encode_latents(ae, pixels, torch.Generator().manual_seed(seed))

        facts = {
            "path": self._cache.table.path_of(wanted.row),
            "file": list(wanted.clip),
            "model": self._cache.ae_digest,
            "shape": list(wanted.shape),
            "window": wanted.window,
        }
        for part, key in wanted.keys.items():
            if part == WHOLE:
                latent = encode(part, video)[0]
            else:
                (latent,) = PixelParts(video, lambda pixels, part=part: encode(part, pixels)).latents([(0, part)])  # type: ignore[misc]
            self._add(writer, key, {"latent": latent}, {**facts, "part": list(part)})

    # -- both -------------------------------------------------------------------------------------------------------

    def _add(self, writer: StoreWriter, key: str, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        self.result.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if writer.add(key, tensors, facts) is not None:
            self._written = time.monotonic()
        elif time.monotonic() - self._written > _FLUSH_SECONDS:
            writer.flush()
            self._written = time.monotonic()

    def _failed(self, row: int, reason: str, limit: FailureLimit) -> None:
        path = self._cache.table.path_of(row)
        self.result.unreadable[path] = reason
        limit.add(0, [Failure(row, path, reason)])

    def _write_unreadable(self) -> None:
        """For training, which replaces these clips and names them; it is written anew each time."""
        path = self._cache.folder / f"{UNREADABLE}{self._ranks.rank:05d}.json"
        try:
            path.write_text(json.dumps(self.result.unreadable, indent=1), encoding="utf-8")
        except OSError as error:
            raise cannot_write(path.parent, error) from error


def _batch(wanted: _Window) -> Batch:
    shape = wanted.shape
    return Batch((wanted.row,), shape.frames, shape.height, shape.width, (clip_position(wanted.clip.digest),))
