"""The nets of a reconstruction: the autoencoder (its architecture, weights, and what it was trained on), and LPIPS."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from osora_cli.checkpoint.layout import MANIFEST, RUNNING_STATES
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.resolve import resolve_load
from osora_cli.config.freeze import JSON_NAME, YAML_NAME, thaw
from osora_cli.config.models.dc_ae import DcAeConfig, compression, plan
from osora_cli.data.aspect import resolve_resolution
from osora_cli.errors import CheckpointError, ConfigError, SetupError
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.lpips_weights import FETCH_COMMAND, load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS
from osora_cli.model.weights import load_weights
from osora_cli.tensors import TensorShard

_ARCHITECTURE = ("model_name", "encoder", "decoder", "latent_channels")
# What may differ from training, and is the user's where given.
_FREE = (
    "scaling_factor",
    "strict_load",
    "use_spatial_tiling",
    "use_temporal_tiling",
    "spatial_tile_size",
    "temporal_tile_size",
    "tile_overlap_factor",
)
_HUB = "hf://"


@dataclass(frozen=True)
class Trained:
    """Largest clips that a run trains on: frames, and the edge of a square of as many pixels, in whole latents."""

    frames: int
    edge: int


@dataclass
class Found:
    """An autoencoder, not built yet.

    Attributes:
        config: its architecture and tiling, checked.
        weights: the checkpoint's folder, the weights' file, or a name on the hub.
        is_checkpoint: whether `weights` is a checkpoint.
        trained: from the run's config; None where there is none.
        notes: what the user should be told.
    """

    config: DcAeConfig
    weights: str
    is_checkpoint: bool
    trained: Trained | None
    notes: list[str] = field(default_factory=list)

    @property
    def chunk(self) -> int:
        """Frames that a long clip is coded in at a time: the trained length, else the tile's, in whole latents."""
        time, _ = compression(self.config)
        frames = self.trained.frames if self.trained else self.config.temporal_tile_size
        return frames if frames == 1 else max(2 * time, frames // time * time)


@dataclass(frozen=True)
class Loaded:
    """The net with its weights, and which these are: `step` is the checkpoint's number of updates."""

    model: DcAe
    step: int | None
    ema: bool


@dataclass(frozen=True)
class LpipsMetric:
    """LPIPS that scores, and what its numbers hang on.

    Attributes:
        net: fp32.
        path: the weights' file.
        sha256: of the file, hex.
    """

    net: LPIPS
    path: Path
    sha256: str


def find_lpips(wanted: bool | None, notes: list[str]) -> LpipsMetric | None:
    """LPIPS on the CPU, in fp32. None where it is not wanted, or cannot be had and `wanted` is None: `notes` says so.

    Raises:
        SetupError: it is wanted (True), and its weights are not on this machine or not whole.
    """
    if wanted is False:
        return None
    try:
        path = locate_lpips(without="`--no-lpips`")
        net = load_lpips(path)
    except SetupError as error:
        if wanted:
            raise
        notes.append(f"LPIPS is left out: {error.message}; fetch them with `{FETCH_COMMAND}`")
        return None
    return LpipsMetric(net, path, hashlib.sha256(path.read_bytes()).hexdigest())


def find_autoencoder(given: DcAeConfig) -> Found:
    """Find what `model.from_pretrained` names, and settle the architecture, without building anything.

    A checkpoint or run brings the architecture with it: from the config frozen into the run. The user's own may repeat
    it, and sets tiling; it cannot contradict it.

    Raises:
        ConfigError: no weights are named, no architecture is known, or the user's is not the run's.
        CheckpointError: nothing is there, or nothing that verifies.
    """
    name = given.from_pretrained
    if name is None:
        raise ConfigError(
            "no weights are given",
            where="model.from_pretrained",
            hint="--model.from-pretrained RUN, a checkpoint in it, or a .safetensors file",
        )
    if name.startswith(_HUB):
        return _settle(given, None, Found(given, name, False, None))
    path = Path(name).expanduser()
    if path.is_file() or _is_weights_folder(path):
        return _settle(given, _run_above(path), Found(given, str(path), False, None))
    if path.suffix == ".safetensors" and not path.exists():
        raise CheckpointError(
            f"the weights `{name}` do not exist",
            where="model.from_pretrained",
            hint="--model.from-pretrained RUN takes those of a run; `osora train vae` makes one",
        )
    resolved = resolve_load([name])
    notes = [f"passed over {p}: {verdict}, {reason}" for p, verdict, reason in resolved.passed_over]
    found = Found(given, str(resolved.path), True, None, notes)
    return _settle(given, _run_above(resolved.path), found)


def load_autoencoder(found: Found, *, use_ema: bool, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Build the net and fill in its weights: the EMA's where the checkpoint has one and `use_ema`, else its own.

    Raises:
        CheckpointError: the weights are damaged, or of another model.
    """
    # Without `from_pretrained`: which weights these are is settled here, not by the builder.
    model = build_model(found.config.model_copy(update={"from_pretrained": None}), device=device, dtype=dtype)
    assert isinstance(model, DcAe)
    model.eval().requires_grad_(False)
    if not found.is_checkpoint:
        load_weights(model, found.weights, found.config.strict_load)
        return Loaded(model, None, False)
    reader = CheckpointReader(Path(found.weights))
    ema = use_ema and "ema" in reader.groups()
    tensors = dict(model.state_dict())
    # The average covers parameters; what it does not hold is the model's own.
    groups = ["model", "ema"] if ema and set(tensors) - set(reader.tensors("ema")) else ["ema" if ema else "model"]
    for group in groups:
        held = reader.tensors(group)
        shards = [TensorShard.whole(key, value) for key, value in tensors.items() if group == "model" or key in held]
        reader.read_into(group, shards, cast=True)
    return Loaded(model, reader.counters.actual_update_step, ema)


def _is_weights_folder(path: Path) -> bool:
    """A folder of safetensors files, as hubs have them: nothing of a checkpoint, whole or not."""
    of_checkpoint = any((path / name).exists() for name in (RUNNING_STATES, MANIFEST, "model", "optimizer"))
    return path.is_dir() and not of_checkpoint and any(path.glob("*.safetensors"))


def _run_above(path: Path) -> Path | None:
    """The folder of the run that a checkpoint, or a file in one, belongs to."""
    for folder in path.resolve().parents[:3]:
        if (folder / YAML_NAME).is_file() or (folder / JSON_NAME).is_file():
            return folder
    return None


def _settle(given: DcAeConfig, run: Path | None, found: Found) -> Found:
    """Put architecture, tiling and trained size into `found`."""
    names_one = any(getattr(given, name) is not None for name in _ARCHITECTURE)
    try:
        frozen = thaw(run).config if run is not None else None
    except ConfigError as error:
        if not names_one:
            raise
        found.notes.append(f"the run's own config cannot be read, taking this one's architecture: {error.message}")
        frozen = None
    if frozen is None:
        plan(given)
        return found
    trained = getattr(frozen, "model", None)
    if not isinstance(trained, DcAeConfig):
        raise ConfigError(
            f"`{run}` does not train a Video DC-AE", where="model.from_pretrained", allowed="a run of `osora train vae`"
        )
    if names_one:
        _check_same(given, trained, str(run))
    update = {name: getattr(given, name) for name in _FREE if name in given.model_fields_set}
    merged = trained.model_copy(update={**update, "from_pretrained": given.from_pretrained, "is_training": False})
    found.trained = trained_size(getattr(frozen, "bucket_config", {}), compression(trained)[1])
    found.config = _with_tiles(merged, given, found.trained, found.notes)
    plan(found.config)
    return found


def _check_same(given: DcAeConfig, trained: DcAeConfig, run: str) -> None:
    """The user's architecture, filled up from the run's where it is partial, is the run's."""
    set_here = {name: getattr(given, name) for name in _ARCHITECTURE if getattr(given, name) is not None}
    whole = given.model_name is not None or (given.encoder is not None and given.decoder is not None)
    mine, its = plan(given if whole else trained.model_copy(update=set_here)), plan(trained)
    differing = [f.name for f in fields(mine) if getattr(mine, f.name) != getattr(its, f.name)]
    if differing:
        what = "; ".join(
            f"`{name}` is `{_short(mine, name)}` here and `{_short(its, name)}` there" for name in differing
        )
        raise ConfigError(
            f"the config's architecture is not that of the run `{run}`: {what}",
            where=", ".join(f"model.{name}" for name in set_here),
            hint=f"leave {', '.join(f'`model.{name}`' for name in set_here)} out: the run's own is taken",
        )


def _short(planned: object, name: str) -> str:
    value = getattr(planned, name)
    if isinstance(value, int):
        return str(value)
    return f"widths {list(value.widths)}, depths {list(value.depths)}, blocks {list(value.blocks)}"


def trained_size(bucket_config: Mapping[str, Mapping[int, Any]], spatial_compression: int) -> Trained | None:
    """The longest and the largest clips of a training's buckets; None without buckets."""
    lengths = [frames for entry in bucket_config.values() for frames in entry]
    if not lengths:
        return None
    pixels = max(resolve_resolution(name, spatial_compression).pixels for name in bucket_config)
    return Trained(max(lengths), max(1, isqrt(pixels) // spatial_compression) * spatial_compression)


def _with_tiles(merged: DcAeConfig, given: DcAeConfig, trained: Trained | None, notes: list[str]) -> DcAeConfig:
    """Tiles of the trained size unless the user gives others, which are pointed out."""
    if trained is None:
        return merged
    update = {}
    for on, name, unit, size in (
        (merged.use_spatial_tiling, "spatial_tile_size", "px", trained.edge),
        (merged.use_temporal_tiling, "temporal_tile_size", "frames", trained.frames),
    ):
        if not on:
            continue
        mine = getattr(merged, name)
        if name not in given.model_fields_set:
            update[name] = size
        elif mine != size:
            notes.append(f"model.{name} is {mine} {unit}, the model was trained on {size} {unit}: expect artefacts")
    return merged.model_copy(update=update)
