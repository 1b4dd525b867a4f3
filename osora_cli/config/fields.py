"""What the schema knows about its own fields: paths, types in words, help, and the nearest known name.

Overrides, error messages and `osora config show` all read the schema through this module, so that a field is
described in one place only: where it is declared.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from osora_cli.config.base import Section

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class FieldSpec:
    """One field of a schema. `path` is dotted below the root; `default` is None for a section."""

    path: tuple[str, ...]
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    required: bool
    help: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def type_text(self) -> str:
        return describe(self.annotation, self.metadata)


@dataclass(frozen=True)
class Target:
    """What a dotted name stands for: the path in the config and the types that its value may have."""

    path: Path
    annotations: tuple[Any, ...]


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without `Annotated`, and the metadata that stood there, bounds of a `Field(...)` among it."""
    metadata: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        for item in rest:
            metadata += tuple(item.metadata) if isinstance(item, FieldInfo) else (item,)
    return annotation, metadata


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type, `Annotated` and unions taken apart."""
    annotation, _ = unwrap(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for arg in get_args(annotation) for m in members(arg)]
    return [annotation]


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections among the alternatives; several for a section told apart by `type`."""
    # Python 3.10 takes list[str] for a type, and issubclass then refuses it.
    plain = (m for m in members(annotation) if get_origin(m) is None and isinstance(m, type))
    return [m for m in plain if issubclass(m, Section)]


def mapping_of(annotation: Any) -> tuple[Any, Any] | None:
    """(key type, value type) when the field is a mapping with free keys."""
    for member in members(annotation):
        if get_origin(member) is dict:
            key, value = get_args(member)
            return unwrap(key)[0], value
    return None


def walk(schema: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[FieldSpec]:
    """Every field in the order of declaration, a section before its own fields."""
    for name, info in schema.model_fields.items():
        path = (*prefix, name)
        inner = sections_of(info.annotation)
        yield FieldSpec(
            path,
            info.annotation,
            tuple(info.metadata),
            None if inner else _default(info),
            info.is_required(),
            info.description or "",
        )
        seen: set[tuple[str, ...]] = set()
        for section in inner:
            for spec in walk(section, path):
                if spec.path not in seen:
                    seen.add(spec.path)
                    yield spec


def _default(info: FieldInfo) -> Any:
    if info.default_factory is not None:
        return info.default_factory()  # type: ignore[call-arg]  # no factory of ours takes the validated data
    return None if info.default is PydanticUndefined else info.default


def resolve(schemas: Sequence[type[Section]], dotted: str) -> Target | None:
    """The field that `dotted` names, `_` and `-` being the same; None when there is none.

    Below a mapping with free keys (`bucket_config`) each part is a key, taken as it stands; a key that holds a dot
    cannot be written this way.
    """
    parts = dotted.split(".")
    if not all(parts):
        return None
    found: list[Any] = []
    path: Path = ()
    for schema in schemas:
        step = _descend([schema], parts, ())
        if step is not None:
            path = step.path
            found += [a for a in step.annotations if a not in found]
    return Target(path, tuple(found)) if found else None


def _descend(annotations: Sequence[Any], parts: Sequence[str], path: Path) -> Target | None:
    if not parts:
        return Target(path, tuple(annotations))
    head, rest = parts[0], parts[1:]
    name = head.replace("-", "_")
    inner = [
        section.model_fields[name].annotation
        for annotation in annotations
        for section in sections_of(annotation)
        if name in section.model_fields
    ]
    if inner:
        return _descend(inner, rest, (*path, name))
    for annotation in annotations:
        free = mapping_of(annotation)
        if free is not None:
            key: str | int = int(head) if free[0] is int and head.isdigit() else head
            return _descend([free[1]], rest, (*path, key))
    return None


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds: `a number >= 0, or null`."""
    annotation, more = unwrap(annotation)
    bounds = _bounds((*more, *metadata))
    options: list[str] = []
    for member in members(annotation):
        text = _describe_member(member)
        if bounds and text in ("a number", "a whole number"):
            text = f"{text} {bounds}"
        elif text == "text" and any(getattr(item, "min_length", None) for item in (*more, *metadata)):
            text = "text that is not empty"
        if text not in options:
            options.append(text)
    options.sort(key=lambda text: text == "null")
    return ", or ".join(options) if options[-1] == "null" else " or ".join(options)


def _describe_member(member: Any) -> str:
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if member in simple:
        return simple[member]
    origin, args = get_origin(member), get_args(member)
    if origin is Literal:
        words = [("true" if a else "false") if isinstance(a, bool) else f"`{a}`" for a in args]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if origin is list:
        return f"a list of {_plural(args[0])}"
    if origin is tuple:
        same = len(set(map(describe, args))) == 1
        return f"a list of {len(args)} {_plural(args[0])}" if same else f"a list [{', '.join(map(describe, args))}]"
    return "a mapping"


def _plural(annotation: Any) -> str:
    text = describe(annotation)
    words = {"a number": "numbers", "a whole number": "whole numbers", "text": "texts", "true or false": "truth values"}
    for one, many in words.items():
        if text == one or text.startswith((f"{one} >", f"{one} <")):
            return many + text.removeprefix(one)
    return f"values, each {text}"


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(
        f"{sign} {getattr(item, name)}"
        for name, sign in signs.items()
        for item in metadata
        if getattr(item, name, None) is not None
    )


def nearest(name: str, schemas: Sequence[type[Section]]) -> str | None:
    """The known dotted name that `name` was probably meant for; None when nothing is near.

    Spelling first (in its own section, then anywhere, then by the last part alone), then names that it begins, then
    the words of the help lines: `ema` finds `ema_decay`, `learning_rate` finds `lr`.
    """
    wanted = name.replace("-", "_")
    specs = [spec for schema in schemas for spec in walk(schema)]
    keys = list(dict.fromkeys(spec.key for spec in specs))
    parent, _, leaf = wanted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == parent}
    for word, table in ((leaf, siblings), (wanted, {key: key for key in keys}), (leaf, _by_leaf(keys))):
        close = difflib.get_close_matches(word, table, n=1, cutoff=0.7)
        if close:
            return table[close[0]]
    phrase = leaf.replace("_", " ")
    related = [key for key in keys if key.rpartition(".")[2].startswith(f"{leaf}_")]
    related += [spec.key for spec in specs if len(phrase) > 3 and spec.help.lower().startswith(phrase)]
    return min(related, key=lambda key: key.count("."), default=None)


def _by_leaf(keys: Sequence[str]) -> dict[str, str]:
    table: dict[str, str] = {}
    for key in sorted(keys, key=lambda k: k.count(".")):
        table.setdefault(key.rpartition(".")[2], key)
    return table
