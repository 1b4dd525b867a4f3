"""The config of a run: frozen into its folder, read back, and compared with what a resume asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from osora_cli.config.base import Section
from osora_cli.config.faults import ConfigFaults, Fault
from osora_cli.config.layers import apply_overrides, read_layers, shown_name
from osora_cli.config.load import check
from osora_cli.config.overrides import Override
from osora_cli.config.registry import Command, command_of
from osora_cli.errors import ConfigError

YAML_NAME, JSON_NAME = "config.yaml", "config.txt"

# Settings of the model that leave parameters and optimizer as they are.
_FREE_MODEL_KEYS = frozenset(
    {
        "from_pretrained",
        "from_scratch",
        "strict_load",
        "use_spatial_tiling",
        "use_temporal_tiling",
        "spatial_tile_size",
        "temporal_tile_size",
        "tile_overlap_factor",
        "disc_off_grad_ckpt",
        "pretrained_rope",
        "grad_ckpt_settings",
    }
)
# And of the frozen autoencoder of a diffusion training, those that its latents do not hang on, or hardly.
_FREE_AE_KEYS = _FREE_MODEL_KEYS | {"sample_size", "sample_tsize", "use_slicing"}
_PLACE_KEYS = frozenset({"outputs", "exp_name"})


@dataclass(frozen=True)
class Change:
    """A value that differs between two configs."""

    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Frozen:
    """The config of a run, and the command that it belongs to."""

    command: Command
    config: Section
    path: Path


def to_plain(config: Section) -> dict[str, Any]:
    """The config as dicts, lists, numbers and text, every field present."""
    plain = _plain(config.model_dump(mode="python"))
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes lists of plain values in one line, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: _Dumper, data: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


def to_yaml(config: Section, title: str | None = None) -> str:
    """The resolved config as YAML that is itself a valid config. `title` becomes a comment in the first line."""
    return values_to_yaml(to_plain(config), title)


def values_to_yaml(values: Mapping[str, Any], title: str | None = None) -> str:
    """Plain values as YAML, in their order, lists of plain values in one line."""
    head = f"# {title}\n" if title else ""
    return head + yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def plain_text(value: Any) -> str:
    """One value as it is written in YAML, in one line."""
    text = yaml.dump(_plain(value), Dumper=_Dumper, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def write_config(config: Section, folder: Path, title: str | None = None) -> None:
    """Write `config.yaml` (resolved, a valid config) and `config.txt` (the same as JSON, as Open-Sora) into `folder`.

    Each file is written beside its place and renamed, so that a reader never sees half of one. Raises OSError.
    """
    _replace(folder / JSON_NAME, json.dumps(to_plain(config), indent=4, ensure_ascii=False) + "\n")
    _replace(folder / YAML_NAME, to_yaml(config, title))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def thaw(run: Path, overrides: Sequence[Override] = ()) -> Frozen:
    """The config of the run in folder `run`, with `overrides` on it, checked by its command's schema.

    Reads `config.yaml`, or `config.txt` where that is missing. Raises ConfigError when there is neither, or it is
    no valid config.
    """
    path = next((run / name for name in (YAML_NAME, JSON_NAME) if (run / name).is_file()), None)
    if path is None:
        raise ConfigError(
            f"`{shown_name(run)}` holds no {YAML_NAME}", hint="give the folder of a run, or a checkpoint inside one"
        )
    layer = read_layers(path)
    command = command_of(layer.data)
    config = check(apply_overrides(layer, overrides), command.schema, "the run's config")
    return Frozen(command, config, path)


def diff_configs(old: Section, new: Section) -> list[Change]:
    """Every value that differs, by dotted key, in the order of the schema. A list is one value."""
    changes: list[Change] = []
    _diff(to_plain(old), to_plain(new), "", changes)
    return changes


def _diff(old: Any, new: Any, prefix: str, changes: list[Change]) -> None:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new or type(old) is not type(new):
            changes.append(Change(prefix, old, new))
        return
    for key in dict.fromkeys((*old, *new)):
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if key in old and key in new:
            _diff(old[key], new[key], dotted, changes)
        else:
            changes.append(Change(dotted, old.get(key), new.get(key)))


def check_resume(old: Section, new: Section) -> list[Change]:
    """What a resume with config `new` changes in a run of config `old`.

    Raises ConfigError naming every change that parameters and optimizer cannot follow, and changes of the run's
    folder, which a resume stays in.
    """
    changes = diff_configs(old, new)
    faults = [fault for fault in map(_resume_fault, changes) if fault is not None]
    if faults:
        raise ConfigFaults(faults, "what this resume changes")
    return changes


def _resume_fault(change: Change) -> Fault | None:
    section, _, rest = change.key.partition(".")
    what = f"`{change.key}` is `{change.old}` in the run and `{change.new}` here"
    if section in ("model", "discriminator") and rest.partition(".")[0] not in _FREE_MODEL_KEYS:
        return Fault(
            f"{what}: its checkpoints hold another model",
            hint="start a run of its own with `osora train ... --model.from-pretrained CKPT`",
        )
    if section == "ae" and rest.partition(".")[0] not in _FREE_AE_KEYS:
        return Fault(
            f"{what}: the run is trained on other latents",
            hint="start a run of its own with `osora train ... --model.from-pretrained CKPT`",
        )
    if change.key == "freeze_layers":
        return Fault(
            f"{what}: the optimizer counts the trained parameters",
            hint="start a run of its own with `osora train ... --model.from-pretrained CKPT`",
        )
    if change.key in _PLACE_KEYS:
        return Fault(f"{what}: a resumed run stays in its folder", hint="leave it out")
    return None
