"""Which networks a cache is of: digests of autoencoder and text embedders, found without building them where possible.

A digest is over weights, and to have it the network has to be built. So the cache keeps, beside each, a fingerprint of
the files that the weights came from (names, sizes, times) and of the config: where that is the same, so is the digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from osora_cli.app.frozen_parts import build_frozen_parts
from osora_cli.app.reconstruct.find import find_autoencoder
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.errors import SetupError
from osora_cli.model.digest import encoder_digest
from osora_cli.model.latents import FrozenParts
from osora_cli.tensors import DTYPES

MODELS = "models.json"
# Of a section: where weights are found, and what no latent or embedding hangs on.
_NOT_OPTIONS = {"from_pretrained", "from_scratch", "strict_load", "cache_dir", "disc_off_grad_ckpt", "shardformer"}
_HUB = "hf://"
_CPU = torch.device("cpu")


class CacheModels:
    """Digests of a config's frozen networks.

    Args:
        config: with its autoencoder resolved (`resolve_autoencoder`).
        folder: the cache's, where fingerprints are kept.
        parts: networks that are built already; others are built on the CPU when their digest is not known.
    """

    def __init__(self, config: TrainDiffusionConfig, folder: Path, parts: FrozenParts | None = None) -> None:
        self._config, self._folder = config, folder
        self._parts = parts or FrozenParts(None, None, None)

    def autoencoder(self) -> str:
        """Digest of what latents follow from. Raises OsoraError where weights are missing or damaged."""
        return self._digest("ae", self._config.ae.from_pretrained, self._build_autoencoder)

    def texts(self) -> str:
        """Digest of both text embedders. Raises OsoraError where weights are missing or damaged."""
        t5 = self._digest("t5", self._config.t5.from_pretrained, lambda: self._build_text().t5)
        clip = self._digest("clip", self._config.clip.from_pretrained, lambda: self._build_text().clip)
        return xxhash.xxh3_128_hexdigest(f"{t5}{clip}".encode())

    def _digest(self, name: str, source: str | None, build: Callable[[], Any]) -> str:
        options = {**_options(getattr(self._config, name)), "dtype": self._config.dtype}
        fingerprint = self._fingerprint(name, source, options)
        known = self._known()
        if fingerprint is not None and fingerprint in known:
            return known[fingerprint]
        digest = encoder_digest(build(), options)
        if fingerprint is not None:
            self._keep({**self._known(), fingerprint: digest})
        return digest

    def _fingerprint(self, name: str, source: str | None, options: dict[str, Any]) -> str | None:
        """Of config and weight files; None where there are no files to look at."""
        config = self._config
        origin: Any = ["seed", config.seed]
        if source is not None:
            if source.startswith(_HUB):
                return None
            section = config.ae
            weights = source
            if name == "ae" and isinstance(section, DcAeConfig):
                weights = find_autoencoder(section).weights
            if not Path(weights).exists():
                return None
            origin = [config.ae_use_ema, _files(Path(weights))]
        return xxhash.xxh3_128_hexdigest(json.dumps([name, options, origin], sort_keys=True, default=str).encode())

    def _build_autoencoder(self) -> Any:
        if self._parts.ae is not None:
            return self._parts.ae
        return build_frozen_parts(self._config, _CPU, DTYPES[self._config.dtype], text=False).ae

    def _build_text(self) -> FrozenParts:
        if self._parts.t5 is None or self._parts.clip is None:
            self._parts = build_frozen_parts(self._config, _CPU, DTYPES[self._config.dtype], ae=False)
        return self._parts

    def _known(self) -> dict[str, str]:
        try:
            read = json.loads((self._folder / MODELS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in read.items()} if isinstance(read, dict) else {}

    def _keep(self, known: dict[str, str]) -> None:
        """Written in one rename. Ranks that write at once may lose a fingerprint, which costs a build and no more."""
        if not self._folder.is_dir():
            return
        unfinished = self._folder / f".{MODELS}-{os.getpid()}"
        try:
            unfinished.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
            unfinished.replace(self._folder / MODELS)
        except OSError as error:
            raise SetupError(f"the cache `{self._folder}` cannot be written: {error}") from error


def _options(section: Any) -> dict[str, Any]:
    values: dict[str, Any] = section.model_dump(mode="json")
    return {key: value for key, value in values.items() if key not in _NOT_OPTIONS}


def _files(weights: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of all files in a folder."""
    files = sorted(path for path in weights.rglob("*") if path.is_file()) if weights.is_dir() else [weights]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
