"""Which autoencoder reconstructs: its weights, its architecture, and what it was trained on, before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isqrt
from pathlib import Path
from typing import Any

from osora_cli.checkpoint.layout import MANIFEST, RUNNING_STATES
from osora_cli.checkpoint.resolve import resolve_load
from osora_cli.config.freeze import JSON_NAME, YAML_NAME, thaw
from osora_cli.config.models.autoencoder import Autoencoder, check, compression, is_causal, tile_names
from osora_cli.config.models.dc_ae import DcAeConfig, plan
from osora_cli.data.aspect import resolve_resolution
from osora_cli.errors import CheckpointError, ConfigError

_ARCHITECTURE = ("model_name", "encoder", "decoder", "latent_channels")
# What may differ from training, and is the user's where given.
_FREE = (
    "scaling_factor",
    "strict_load",
    "use_spatial_tiling",
    "use_temporal_tiling",
    "spatial_tile_size",
    "temporal_tile_size",
    "sample_size",
    "sample_tsize",
    "tile_overlap_factor",
    "use_slicing",
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

    config: Autoencoder
    weights: str
    is_checkpoint: bool
    trained: Trained | None
    notes: list[str] = field(default_factory=list)

    @property
    def chunk(self) -> int:
        """Frames that a long clip is coded in at a time: the trained length, else the tile's, in whole latents."""
        time, _ = compression(self.config)
        tile = int(getattr(self.config, tile_names(self.config)[1]))
        if is_causal(self.config):
            frames = self.trained.frames if self.trained else tile + 1
            return (frames - 1) // time * time + 1
        frames = self.trained.frames if self.trained else tile
        return frames if frames == 1 else max(2 * time, frames // time * time)


def find_autoencoder(given: Autoencoder) -> Found:
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


def _is_weights_folder(path: Path) -> bool:
    """A folder of safetensors files, as hubs have them: nothing of a checkpoint, whole or not."""
    # Nor of a run: an export may lie in its folder.
    known = (RUNNING_STATES, MANIFEST, "model", "optimizer", YAML_NAME, JSON_NAME)
    of_checkpoint = any((path / name).exists() for name in known)
    return path.is_dir() and not of_checkpoint and any(path.glob("*.safetensors"))


def _run_above(path: Path) -> Path | None:
    """The folder of the run that a checkpoint, or a file in one, belongs to."""
    for folder in path.resolve().parents[:3]:
        if (folder / YAML_NAME).is_file() or (folder / JSON_NAME).is_file():
            return folder
    return None


def _settle(given: Autoencoder, run: Path | None, found: Found) -> Found:
    """Put architecture, tiling and trained size into `found`."""
    names_one = bool(_named_parts(given))
    try:
        frozen = thaw(run).config if run is not None else None
    except ConfigError as error:
        if not names_one and isinstance(given, DcAeConfig):
            raise
        found.notes.append(f"the run's own config cannot be read, taking this one's architecture: {error.message}")
        frozen = None
    if frozen is None:
        check(given)
        return found
    trained = getattr(frozen, "model", None)
    if not isinstance(trained, type(given)):
        kind = getattr(trained, "type", "no autoencoder")
        raise ConfigError(
            f"the run `{run}` trains `{kind}`, this config's model is `{given.type}`",
            where="model.from_pretrained",
            allowed="a run that trains a model of this type (`model.type`)",
        )
    if names_one:
        _check_same(given, trained, str(run))
    update = {name: getattr(given, name) for name in _FREE if name in given.model_fields_set}
    update["from_pretrained"] = given.from_pretrained
    if isinstance(trained, DcAeConfig):
        update["is_training"] = False
    merged = trained.model_copy(update=update)
    found.trained = trained_size(getattr(frozen, "bucket_config", {}), compression(trained)[1])
    found.config = _with_tiles(merged, given, found.trained, found.notes)
    check(found.config)
    return found


def _named_parts(given: Autoencoder) -> dict[str, Any]:
    """What the user's config says of the architecture."""
    if isinstance(given, DcAeConfig):
        return {name: getattr(given, name) for name in _ARCHITECTURE if getattr(given, name) is not None}
    free = {"type", "from_pretrained", *_FREE}
    return {name: getattr(given, name) for name in type(given).model_fields if name in given.model_fields_set - free}


def _differing(given: Autoencoder, trained: Autoencoder) -> list[str]:
    """Each difference in architecture, in words. The user's, where it is partial, is filled up from the run's."""
    named = _named_parts(given)
    if not (isinstance(given, DcAeConfig) and isinstance(trained, DcAeConfig)):
        pairs = {name: (value, getattr(trained, name)) for name, value in named.items()}
        return [
            f"`{name}` is `{here}` here and `{there}` there" for name, (here, there) in pairs.items() if here != there
        ]
    whole = given.model_name is not None or (given.encoder is not None and given.decoder is not None)
    mine, its = plan(given if whole else trained.model_copy(update=named)), plan(trained)
    names = [f.name for f in fields(mine) if getattr(mine, f.name) != getattr(its, f.name)]
    return [f"`{name}` is `{_short(mine, name)}` here and `{_short(its, name)}` there" for name in names]


def _check_same(given: Autoencoder, trained: Autoencoder, run: str) -> None:
    """The user's architecture is the run's."""
    differing = _differing(given, trained)
    if differing:
        keys = [f"model.{name}" for name in _named_parts(given)]
        raise ConfigError(
            f"the config's architecture is not that of the run `{run}`: {'; '.join(differing)}",
            where=", ".join(keys),
            hint=f"leave {', '.join(f'`{key}`' for key in keys)} out: the run's own is taken; on the command line "
            + " ".join(f"`--{key.replace('_', '-')} null`" for key in keys),
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


def _with_tiles(merged: Autoencoder, given: Autoencoder, trained: Trained | None, notes: list[str]) -> Autoencoder:
    """Tiles of the trained size unless the user gives others, which are pointed out."""
    if trained is None:
        return merged
    update = {}
    time, _ = compression(merged)
    frames = trained.frames - is_causal(merged)
    # Stills, or lengths between two latents, are no tile.
    whole = frames % time == 0 and frames >= 2 * time
    edge_name, length_name = tile_names(merged)
    for on, name, unit, size, fits in (
        (merged.use_spatial_tiling, edge_name, "px", trained.edge, True),
        (merged.use_temporal_tiling, length_name, "frames", frames, whole),
    ):
        if not on:
            continue
        mine = getattr(merged, name)
        if name not in given.model_fields_set and fits:
            update[name] = size
        elif mine != size:
            cure = f"; `--model.{name.replace('_', '-')} {size}` takes the trained size" if fits else ""
            notes.append(
                f"model.{name} is {mine} {unit}, the model was trained on {size} {unit}: expect artefacts{cure}"
            )
    return merged.model_copy(update=update)
