"""What the schema finds wrong with a config, in our words: each fault with its place, what is allowed, and a cure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from osora_cli.config.base import Section
from osora_cli.config.fields import Path, describe, mapping_of, nearest, resolve, sections_of, walk
from osora_cli.config.source import Layer
from osora_cli.errors import ConfigError

_LONGEST_VALUE = 80


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    message: str
    where: str | None = None
    allowed: str | None = None
    hint: str | None = None

    def line(self) -> str:
        out = f"{self.where}: {self.message}" if self.where else self.message
        if self.allowed:
            out += f"; allowed: {self.allowed}"
        return f"{out}; {self.hint}" if self.hint else out


class ConfigFaults(ConfigError):
    """All faults of one config, or of one command line, at once."""

    def __init__(self, faults: Sequence[Fault], subject: str) -> None:
        self.faults = tuple(faults)
        if len(self.faults) == 1:
            only = self.faults[0]
            super().__init__(only.message, where=only.where, allowed=only.allowed, hint=only.hint)
        else:
            lines = [f"{len(self.faults)} things are wrong in {subject}", *(f"  {fault.line()}" for fault in faults)]
            super().__init__("\n".join(lines))

    def to_json(self) -> list[dict[str, str | None]]:
        return [asdict(fault) for fault in self.faults]


def schema_faults(error: ValidationError, schema: type[Section], layer: Layer) -> list[Fault]:
    """The faults in a ValidationError, one for each place in the config, in the order of the config."""
    groups: dict[Path, list[Any]] = {}
    for item in error.errors():
        groups.setdefault(_data_path(item["loc"], item["type"], layer.data), []).append(item)
    inside = {path: [p for p in groups if len(p) > len(path) and p[: len(path)] == path] for path in groups}
    faults = []
    for path, items in groups.items():
        # A list that may also be text: the fault of its third item says more than "it is not text".
        if inside[path] and isinstance(_value_at(layer.data, path), (dict, list, tuple)):
            continue
        faults.append(_fault(path, items, schema, layer))
    return faults


def _data_path(loc: tuple[int | str, ...], kind: str, data: Any) -> Path:
    """pydantic's location without the names of union members and other marks that are not in the config."""
    path: Path = ()
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(data, dict):
            key = next((k for k in data if k == part or str(k) == str(part)), None)
            if key is not None:
                path, data = (*path, key), data[key]
            elif last and kind == "missing":
                path = (*path, part)
        elif isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data):
            path, data = (*path, part), data[part]
        elif isinstance(data, (list, tuple)) and last and kind == "missing":
            path = (*path, part)
    return path


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _fault(path: Path, items: list[Any], schema: type[Section], layer: Layer) -> Fault:
    key = ".".join(str(part) for part in path)
    where, item = layer.where(path), items[0]
    kinds = {i["type"] for i in items}
    value = _show(_value_at(layer.data, path))
    if kinds <= {"extra_forbidden", "invalid_key"}:
        return _unknown(path, key, where, schema, layer)
    if kinds == {"missing"}:
        return Fault(f"`{key}` is missing", where, _allowed(path, schema))
    if kinds & {"union_tag_invalid", "union_tag_not_found"}:
        types = resolve([schema], f"{key}.type")
        expected = ", ".join(describe(a) for a in types.annotations) if types else None
        tag = item.get("ctx", {}).get("tag")
        message = f"`{key}.type` is missing" if tag is None else f"`{key}.type` is `{tag}`"
        return Fault(message, layer.where((*path, "type")) if tag else where, expected)
    if kinds == {"value_error"}:
        return Fault(f"`{key}`: {item['ctx']['error']}" if key else str(item["ctx"]["error"]), where)
    hint = None
    if kinds == {"string_type"} and not isinstance(item["input"], (dict, list, type(None))):
        hint = "write it in quotes"
    return Fault(f"`{key}` is `{value}`", where, _allowed(path, schema) or item["msg"], hint)


def _unknown(path: Path, key: str, where: str | None, schema: type[Section], layer: Layer) -> Fault:
    near = nearest(key, [schema])
    hint = f"did you mean `{near}`?" if near else "`osora config show` lists the keys"
    section = path[:-1]
    origins = {str(layer.where((*section, name))).partition(":")[0] for name in _names(layer, section)}
    if section and "type" in _names(layer, section) and len(origins) > 1:
        hint += f"; `_delete_: true` in `{'.'.join(map(str, section))}` replaces what `_base_` says instead of merging"
    return Fault(f"`{key}` is not a key of this config", where, hint=hint)


def _names(layer: Layer, section: Path) -> list[Any]:
    inner = _value_at(layer.data, section)
    return list(inner) if isinstance(inner, dict) else []


def _allowed(path: Path, schema: type[Section]) -> str | None:
    """The types of the field at `path` in words; of a value inside a list or free mapping: of the field around it."""
    specs = {spec.path: spec for spec in walk(schema)}
    for end in range(len(path), 0, -1):
        spec = specs.get(tuple(str(part) for part in path[:end]))
        if spec is None:
            continue
        target = resolve([schema], ".".join(str(part) for part in path)) if end < len(path) else None
        if target is not None:
            return " or ".join(describe(a) for a in target.annotations)
        structured = sections_of(spec.annotation) or mapping_of(spec.annotation)
        text = f"{spec.type_text}, {spec.help}" if structured else spec.type_text
        return text if end == len(path) else f"`{spec.key}` is {text}"
    return None


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
