"""One layer of plain data out of a config, its `_base_` configs and the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from osora_cli.config.fields import Path
from osora_cli.config.opensora import read_python
from osora_cli.config.overrides import Override
from osora_cli.config.presets import SUFFIXES, find_preset
from osora_cli.config.source import Layer, read_yaml
from osora_cli.errors import ConfigError

BASE, DELETE = "_base_", "_delete_"


def shown_name(path: FilePath) -> str:
    """A file's name for messages: relative where it lies below the working directory."""
    absolute = FilePath(os.path.abspath(path))  # not resolve(): a link keeps the name that the user gave it
    try:
        return absolute.relative_to(FilePath.cwd()).as_posix()
    except ValueError:
        return str(absolute)


def read_layers(path: FilePath, group: str = "") -> Layer:
    """The config at `path` merged over its `_base_` configs, the later over the earlier.

    Raises ConfigError for a base that is missing, a circle of bases, or text that is no config.
    """
    return _read(path, group, ())


def _read(path: FilePath, group: str, above: tuple[FilePath, ...]) -> Layer:
    shown = shown_name(path)
    if path.suffix not in (*SUFFIXES, ".json", ".txt", ".py"):
        raise ConfigError(
            f"`{shown}` is of the kind `{path.suffix}`, which cannot be read",
            allowed="YAML (.yaml, .yml), or a Python config of Open-Sora's (.py)",
        )
    layer = read_python(path, shown) if path.suffix == ".py" else read_yaml(path, shown)
    bases = _base_names(layer)
    real = path.resolve()
    merged = Layer()
    for index, name in enumerate(bases):
        where = layer.marks.get((BASE, index)) or layer.marks.get((BASE,))
        base = _find_base(path, name, group, where)
        if base.resolve() in (*above, real):
            circle = " -> ".join(f"`{shown_name(p)}`" for p in (*above, real, base.resolve()))
            raise ConfigError(f"`{BASE}` runs in a circle: {circle}", where=where)
        merged = merge(merged, _read(base, group, (*above, real)))
    layer.data.pop(BASE, None)
    layer.forget((BASE,))
    _refuse_inner_bases(layer)
    return merge(merged, layer)


def _base_names(layer: Layer) -> list[str]:
    value = layer.data.get(BASE, [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"`{BASE}` is `{value}`", where=layer.where((BASE,)), allowed="a path or preset's name, or a list of them"
        )
    return names


def _find_base(path: FilePath, name: str, group: str, where: str | None) -> FilePath:
    beside = path.parent / FilePath(name).expanduser()
    if beside.is_file():
        return beside
    preset = find_preset(name, group)
    if preset is None:
        raise ConfigError(
            f"`{BASE}` names `{name}`, which is not there",
            where=where,
            allowed=f"a preset's name, or a path relative to `{shown_name(path.parent)}`",
        )
    return preset[1]


def _refuse_inner_bases(layer: Layer) -> None:
    for path in layer.marks:
        if path and path[-1] == BASE:
            raise ConfigError(
                f"`{'.'.join(map(str, path))}` stands inside a section",
                where=layer.where(path),
                allowed=f"`{BASE}` at the top of the file only",
            )


def merge(base: Layer, over: Layer) -> Layer:
    """`over` laid on `base`: mappings merge key by key, everything else replaces.

    A mapping with `_delete_: true` replaces too. Neither argument is changed.
    """
    out = Layer(dict(base.data), dict(base.marks))
    out.data = _merge_mapping(out, base.data, over, over.data, ())
    if () in over.marks:
        out.marks[()] = over.marks[()]
    return out


def _merge_mapping(out: Layer, old: dict[Any, Any], over: Layer, new: dict[Any, Any], path: Path) -> dict[Any, Any]:
    result = {} if _deletes(over, new, path) else dict(old)
    if not result:
        out.forget(path)
    for key, value in new.items():
        if key == DELETE:
            continue
        here = (*path, key)
        inner = result.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            result[key] = _merge_mapping(out, inner, over, value, here)
        else:
            out.forget(here)
            result[key] = _merge_mapping(out, {}, over, value, here) if isinstance(value, dict) else value
            for known, mark in over.marks.items():
                if known[: len(here)] == here and DELETE not in known:
                    out.marks[known] = mark
    return result


def _deletes(over: Layer, mapping: dict[Any, Any], path: Path) -> bool:
    flag = mapping.get(DELETE, False)
    if not isinstance(flag, bool):
        raise ConfigError(f"`{DELETE}` is `{flag}`", where=over.where((*path, DELETE)), allowed="true or false")
    return flag


def apply_overrides(layer: Layer, overrides: Sequence[Override]) -> Layer:
    """`layer` with the command line's values. Raises ConfigError for a key below a value that is no mapping.

    A whole section (`--model '{...}'`) replaces the config's; keys of that section given beside it are set in it,
    whichever stands first. Of equal keys the last wins.
    """
    out = Layer(_copy(layer.data), dict(layer.marks))
    for override in sorted(overrides, key=lambda o: len(o.path)):
        _set(out, override)
    return out


def _set(layer: Layer, override: Override) -> None:
    node: dict[Any, Any] = layer.data
    path: Path = ()
    for part in override.path[:-1]:
        key = _known_key(node, part)
        path = (*path, key)
        if node.get(key) is None:
            node[key] = {}
            layer.marks[path] = override.flag
        if not isinstance(node[key], dict):
            raise ConfigError(
                f"`{override.key}` cannot be set: `{'.'.join(map(str, path))}` is `{node[key]}`",
                where=f"{override.flag}; {layer.where(path)}",
            )
        node = node[key]
    key = _known_key(node, override.path[-1])
    here = (*path, key)
    layer.forget(here)
    node[key] = _copy(override.value)
    if isinstance(node[key], dict):
        node[key].pop(DELETE, None)
    layer.marks[here] = override.flag


def _known_key(node: dict[Any, Any], part: str | int) -> str | int:
    """The key that stands in `node` already and differs from `part` by `_` for `-` or by type only, else `part`."""
    wanted = str(part).replace("-", "_")
    for key in node:
        if key == part:
            return part
    return next((key for key in node if str(key).replace("-", "_") == wanted), part)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
