"""Values given on the command line: `Override`, and how a text becomes a value of the field's type."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml

from osora_cli.config.fields import Path, Target, mapping_of, members, sections_of
from osora_cli.config.source import parse_inline
from osora_cli.errors import UsageError

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NULL_WORDS = frozenset({"none", "null", "~"})


@dataclass(frozen=True)
class Override:
    """`path` in the config gets `value`; `flag` is what the user wrote, for messages (`--optim.lr`)."""

    path: Path
    value: Any
    flag: str

    @property
    def key(self) -> str:
        return ".".join(str(part) for part in self.path)


def truth(text: str) -> bool | None:
    """True or False for a truth word in any case, else None."""
    word = text.lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def is_switch(target: Target) -> bool:
    """Whether the field may stand alone as a flag: `--async-io`."""
    return any(_takes_truth(m) for annotation in target.annotations for m in members(annotation))


def takes_many(target: Target) -> bool:
    """Whether several values may follow the flag, as a wildcard leaves them that the shell has expanded."""
    options = [m for annotation in target.annotations for m in members(annotation)]
    return any(get_origin(m) is list and get_args(m) == (str,) for m in options)


def _takes_truth(member: Any) -> bool:
    return member is bool or (get_origin(member) is Literal and all(isinstance(a, bool) for a in get_args(member)))


def parse_value(target: Target, text: str, flag: str) -> Any:
    """The value that `text` stands for, given the types that the field may have.

    Text fields keep the text as it stands (`007`). What fits none of the types is handed on as text, and the schema
    refuses it with the list of what it takes. Raises UsageError for a list or mapping that cannot be read.
    """
    options = [m for annotation in target.annotations for m in members(annotation)]
    literals = [a for m in options if get_origin(m) is Literal for a in get_args(m) if isinstance(a, str)]
    if text in literals:
        return text
    if text.lower() in NULL_WORDS:
        if type(None) in options:
            return None
        for word in literals:
            if word.lower() == text.lower():
                return word
    if any(_takes_truth(m) for m in options) and truth(text) is not None:
        return truth(text)
    if int in options or float in options:
        number = _number(text, whole=float not in options)
        if number is not None:
            return number
    return _structure_or_text(target, options, text, flag)


def _structure_or_text(target: Target, options: list[Any], text: str, flag: str) -> Any:
    lists = any(get_origin(m) in (list, tuple) for m in options)
    mappings = any(sections_of(a) or mapping_of(a) for a in target.annotations)
    opening = text.lstrip()[:1]
    if (lists and opening in "[(" and opening) or (mappings and opening == "{"):
        return parse_structure(text, flag)
    if (lists or mappings) and str not in options:
        return parse_structure(text, flag)
    return text


def _number(text: str, *, whole: bool) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if whole and value.is_integer() else value


def parse_structure(text: str, flag: str) -> Any:
    """A list or mapping written as a Python literal, JSON or YAML: `(0.9, 0.98)`, `{"256px": {"1": [1.0, 2]}}`."""
    try:
        return _literal(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return parse_inline(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or str(error)
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise UsageError(
            f"`{shown}` cannot be read as a list or mapping: {reason}",
            where=flag,
            allowed="YAML, JSON or a Python literal, such as [0.9, 0.98] or {256px: {32: [1.0, 1]}}",
        ) from error


def _literal(text: str) -> Any:
    """A Python literal of the kinds that YAML has too. Raises ValueError for any other, and for a key given twice."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [ast.dump(key) for key in node.keys if key is not None]
            if len(keys) != len(set(keys)):
                raise ValueError("a key is given twice")  # YAML says which
        if isinstance(node, ast.Set) or (isinstance(node, ast.Constant) and isinstance(node.value, (bytes, complex))):
            raise ValueError("not a kind of value that a config holds")
    value = ast.literal_eval(tree)
    if value is Ellipsis:
        raise ValueError("not a kind of value that a config holds")
    return value
