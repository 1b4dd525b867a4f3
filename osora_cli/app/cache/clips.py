"""A table's clips and captions as a cache has them: which keys they are under, and what of them is not there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from osora_cli.app.cache.models import CacheModels
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.autoencoder import compression, is_causal
from osora_cli.data.cache import WHOLE, ClipShape, FileIdentity, KnownFiles, WindowRule, latent_key, text_key
from osora_cli.data.cache_store import Store
from osora_cli.data.cached_batch import Part
from osora_cli.data.fps import add_caption_suffix, map_target_fps
from osora_cli.data.table import ClipTable
from osora_cli.errors import DataError, OsoraError
from osora_cli.model.latents import FrozenParts, TextBundle
from osora_cli.trainer.conditions import LatentRules, encoded_parts, possible_kinds
from osora_cli.words import counted

LATENTS, TEXTS = "latents", "text"
UNREADABLE = "unreadable-"
_SHOWN = 5


def cache_folder(config: TrainDiffusionConfig) -> Path:
    """Where the cache of a config's table is: `cache_dir`, else beside the table."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    table = Path(str(config.dataset.data_path)).expanduser()
    return table.with_name(f"{table.stem}.cache")


class ClipCache:
    """What a cache holds for a table under a config.

    Args:
        config: with its autoencoder resolved.
        parts: networks that are built already, so that their digests need no second build.
        video, text: which of the two are wanted; of the other nothing is looked at.

    Raises:
        OsoraError: the networks that the cache should be of cannot be found.
    """

    def __init__(
        self,
        table: ClipTable,
        config: TrainDiffusionConfig,
        *,
        parts: FrozenParts | None = None,
        video: bool = True,
        text: bool = True,
    ) -> None:
        self.folder = cache_folder(config)
        self.table, self.windows = table, config.cache_windows
        models = CacheModels(config, self.folder, parts)
        self.ae_digest = models.autoencoder() if video else ""
        self.text_digest = models.texts() if text else ""
        self.latents = Store.open(self.folder / LATENTS) if video else Store(self.folder / LATENTS)
        self.texts = Store.open(self.folder / TEXTS) if text else Store(self.folder / TEXTS)
        self.unreadable = _read_unreadable(self.folder)
        self._files = KnownFiles(self.latents.entries.values())
        self._identities: dict[int, FileIdentity | None] = {}
        self._config, data = config, config.dataset
        self._rule = WindowRule(data.fps_max, data.rand_sample_interval)
        self._rules = LatentRules(compression(config.ae)[0], is_causal(config.ae))

    def identity(self, row: int) -> FileIdentity | None:
        """Contents of a row's file; None where there is no file and there was none. Raises OSError."""
        if row not in self._identities:
            self._identities[row] = self._files.find(self.table.path_of(row), self.table.tried(row))
        return self._identities[row]

    def parts(self, shape: ClipShape) -> list[Part]:
        """The whole window, and the parts of it that conditions want encoded by themselves."""
        weights = self._config.condition_config
        if weights is None:
            return [WHOLE]
        kinds = possible_kinds(
            {str(kind): weight for kind, weight in weights.items()}, self._rules.frames(shape.frames), self._rules
        )
        return [WHOLE, *encoded_parts(kinds, self._rules)]

    def latent_keys(self, row: int, clip: FileIdentity, shape: ClipShape, window: int) -> dict[Part, str]:
        """Keys of a clip's window, by part."""
        frames, fps = int(self.table.num_frames[row]), float(self.table.fps[row])
        return {
            part: latent_key(
                self.ae_digest,
                clip.digest,
                shape,
                num_frames=frames,
                fps=fps,
                rule=self._rule,
                window=window,
                part=part,
            )
            for part in self.parts(shape)
        }

    def found(self, row: int, shape: ClipShape, window: int) -> dict[Part, str] | None:
        """The keys of a clip's window if all of it is there, else None."""
        try:
            clip = self.identity(row)
        except OSError:
            return None
        if clip is None:
            return None
        keys = self.latent_keys(row, clip, shape, window)
        return keys if all(key in self.latents for key in keys.values()) else None

    def caption(self, row: int) -> str:
        """The caption as training has it, with its suffix."""
        data, scores = self._config.dataset, self.table.score_vmafmotion
        rate = map_target_fps(float(self.table.fps[row]), data.fps_max)[0]
        score = float(scores[row]) if data.vmaf and scores is not None else None
        return add_caption_suffix(self.table.text_of(row), rate, data.fps_max, score)

    def text_key(self, text: str) -> str:
        return text_key(self.text_digest, text)

    def read_latent(self, keys: dict[Part, str]) -> dict[Part, torch.Tensor]:
        """Latents `[C, t, h, w]` by part. Raises DataError where they are damaged."""
        return {part: self.latents.read(key)["latent"] for part, key in keys.items()}

    def read_texts(self, texts: Sequence[str]) -> TextBundle:
        """Embeddings of captions that are there. Raises DataError where they are not, or damaged."""
        self.require_texts(texts)
        read = [self.texts.read(self.text_key(text)) for text in texts]
        return TextBundle(torch.stack([one["t5"] for one in read]), torch.stack([one["clip"] for one in read]))

    def null_text(self) -> TextBundle:
        """The embedding of the empty text, of one sample."""
        return self.read_texts([""])

    def require_texts(self, texts: Iterable[str]) -> None:
        """Raises DataError if captions are not in the cache: how many, which, and what makes them."""
        missing = [text for text in dict.fromkeys(texts) if self.text_key(text) not in self.texts]
        if missing:
            named = ", ".join(f"`{text[:60]}`" for text in missing[:_SHOWN])
            raise self._missing(
                f"the text embeddings of {len(missing)} captions", named, len(missing), bool(self.texts.entries)
            )

    def require_clips(self, clips: Iterable[tuple[int, ClipShape]], window: int) -> None:
        """Raises DataError if clips of these rows and shapes are not in the cache, those apart that cannot be read."""
        missing = [
            (row, shape)
            for row, shape in clips
            if self.found(row, shape, window) is None and self.table.path_of(row) not in self.unreadable
        ]
        if missing:
            named = ", ".join(
                f"`{self.table.path_of(row)}` (row {row}, {s.frames} frames of {s.width}x{s.height}, window {window})"
                for row, s in missing[:_SHOWN]
            )
            raise self._missing(counted(len(missing), "clip"), named, len(missing), bool(self.latents.entries))

    def _missing(self, what: str, named: str, count: int, anything: bool) -> OsoraError:
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        why = "" if anything else "; it holds none at all"
        if anything and count and not self._of_these_models():
            why = "; what it holds was made by other networks, or with other settings of theirs"
        elif self.latents.damaged or self.texts.damaged:
            damaged = [*self.latents.damaged, *self.texts.damaged]
            why = f"; {len(damaged)} of its shards cannot be read, `{damaged[0]}` for one"
        config = self._config
        where = f"--dataset.data-path {config.dataset.data_path}"
        where += "" if config.cache_dir is None else f" --cache-dir {config.cache_dir}"
        return DataError(
            f"the cache `{self.folder}` lacks {what}: {named}{more}{why}",
            where="cached_video, cached_text",
            hint=f"osora data cache CONFIG {where}\n  with the CONFIG of this training: it makes what is missing",
        )

    def _of_these_models(self) -> bool:
        made_by = {str(entry.facts.get("model")) for entry in self.latents.entries.values()}
        texts_by = {str(entry.facts.get("model")) for entry in self.texts.entries.values()}
        fits = not made_by or self.ae_digest in made_by
        return fits and (not texts_by or self.text_digest in texts_by)


def _read_unreadable(folder: Path) -> dict[str, str]:
    """Clips that could not be read when the cache was made, path to reason."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob(f"{UNREADABLE}*.json")):
        try:
            found |= json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found
