"""From a name or path and the command line to a checked config.

Precedence: command line, config, its `_base_` configs, the schema's defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from osora_cli.config.base import Section
from osora_cli.config.faults import ConfigFaults, schema_faults
from osora_cli.config.layers import apply_overrides, read_layers
from osora_cli.config.overrides import Override
from osora_cli.config.presets import find_preset, nearest_preset, preset_names
from osora_cli.config.source import Layer
from osora_cli.errors import ConfigError

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A checked config. `name` is for run folders (`vae_train_video_dc_ae`), `notes` are for the user to read."""

    config: S
    name: str
    path: Path
    notes: list[str] = field(default_factory=list)


def load_config(
    path_or_name: str | Path | None,
    schema: type[S],
    overrides: Sequence[Override] = (),
    *,
    default: str | None = None,
) -> Loaded[S]:
    """Read, merge and check a config.

    Args:
        path_or_name: a file, the name of a preset (`vae/train/video_dc_ae`, `video_dc_ae`), or None for `default`.
        schema: what the config must be.
        overrides: values of the command line; they win over the file's.
        default: full name of the command's first preset; short names are looked for in its folder first.

    Raises ConfigError: no such config, text that is no config, or all that the schema finds wrong, at once.
    """
    group = (default or "").rpartition("/")[0]
    path, notes = find_config(path_or_name, default, group)
    layer = read_layers(path, group)
    config = check(apply_overrides(layer, overrides), schema, "the config")
    return Loaded(config, config_name(path), path, notes)


def check(layer: Layer, schema: type[S], subject: str) -> S:
    """The layer as a config of `schema`. Raises ConfigFaults with everything that is wrong."""
    try:
        return schema.model_validate(layer.data)
    except ValidationError as error:
        raise ConfigFaults(schema_faults(error, schema, layer), subject) from error


def find_config(path_or_name: str | Path | None, default: str | None, group: str) -> tuple[Path, list[str]]:
    """The file that CONFIG means, and what to tell the user about it. Raises ConfigError when there is none."""
    if path_or_name is None:
        found = find_preset(default, group) if default else None
        if found is None:
            raise ConfigError(
                f"no CONFIG is given, and the preset `{default}` is not there",
                where="CONFIG",
                allowed=_presets(group),
            )
        return found[1], [f"no CONFIG given: taking the preset `{found[0]}`"]
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path, []
    text = str(path_or_name)
    found = find_preset(text, group) if _may_be_preset(text) else None
    if found is not None:
        note = f"config: the preset `{found[0]}`"
        if "/" in text and text.startswith(("configs/", "./configs/")):
            note = f"`{text}` is not in this folder: taking the preset `{found[0]}`"
        return found[1], [note]
    raise _not_found(path, text, group)


def _may_be_preset(text: str) -> bool:
    # A path that leads out of this folder, or to a folder of the user's own, never means a preset.
    return not Path(text).expanduser().is_absolute() and ".." not in Path(text).parts


def _not_found(path: Path, text: str, group: str) -> ConfigError:
    if text and path.is_dir():
        inside = path / "config.yaml"
        hint = f"its config is `{inside}`" if inside.is_file() else None
        return ConfigError(f"`{text}` is a folder, a config is needed", hint=hint, allowed=_presets(group))
    hint = None
    near = nearest_preset(text, group)
    if "=" in text:
        hint = f"values are given with dashes: `--{text.lstrip('-')}`"
    elif near:
        hint = f"did you mean `{near}`?"
    return ConfigError(f"the config `{text}` does not exist", where="CONFIG", allowed=_presets(group), hint=hint)


def _presets(group: str) -> str:
    names = preset_names()
    own = [name for name in names if name.startswith((f"{group}/", "demo/"))] if group else names
    return "a YAML file, or a preset: " + ", ".join(f"`{name}`" for name in own) if own else "a YAML file"


def config_name(path: Path) -> str:
    """A name for run folders: the path below the nearest `configs` or `presets` folder, joined by `_`."""
    parts = path.with_suffix("").parts
    for root in ("configs", "presets"):
        if root in parts[:-1]:
            parts = parts[len(parts) - parts[::-1].index(root) :]
            return "_".join(parts)
    return parts[-1]
