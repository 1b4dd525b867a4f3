"""YAML text with the place of every value: plain data plus `{path: "file:line"}`.

PyYAML lets the last of two equal keys win without a word; here that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from osora_cli.config.fields import Path
from osora_cli.errors import ConfigError

# Values a config may hold once its anchors are written out. A config has hundreds; only a bomb has more.
MAX_VALUES = 100_000
_MERGE = "tag:yaml.org,2002:merge"


@dataclass
class Layer:
    """Data of one config file, or of several merged, and where each value came from."""

    data: dict[str, Any] = field(default_factory=dict)
    marks: dict[Path, str] = field(default_factory=dict)

    def where(self, path: Path) -> str | None:
        """Origin of the value at `path`, or of the nearest mapping around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return None

    def forget(self, path: Path) -> None:
        """Drop the marks of `path` and everything below it."""
        for known in [p for p in self.marks if p[: len(path)] == path]:
            del self.marks[known]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                line = seen[key].start_mark.line + 1
                raise yaml.MarkedYAMLError(
                    problem=f"the key `{key}` is given twice, first in line {line}", problem_mark=key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen[key] = key_node
        return super().construct_mapping(node, deep=True)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A whole number. Python refuses to read one of thousands of digits, and says so without a place."""
        try:
            return self.construct_yaml_int(node)
        except ValueError as error:
            raise yaml.MarkedYAMLError(
                problem=f"`{node.value[:20]}...` is no number that can be read", problem_mark=node.start_mark
            ) from error

    def refuse(self, node: yaml.Node) -> Any:
        """A tag that no value of a config has."""
        raise yaml.MarkedYAMLError(
            problem=f"could not determine a constructor for the tag '{node.tag}'", problem_mark=node.start_mark
        )

    def construct_eagerly(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        return self.construct_mapping(node, deep=True)


# YAML 1.1 reads `1:30` as 90, a number of base 60. YAML 1.2 reads text, and so does everybody who writes it.
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_Loader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", _BASE_60), *known] if first in set("-+0123456789") else known
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# SafeLoader's own constructor of mappings fills them later, when an error has lost its place.
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_eagerly)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
# No field holds bytes, and what could not be written out again is not taken in.
_Loader.add_constructor("tag:yaml.org,2002:binary", _Loader.refuse)


def parse_inline(text: str) -> Any:
    """The value of a YAML or JSON text given on the command line. Raises yaml.YAMLError."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _Walk(loader, "", {}).visit(node, (), ())
    return loader.construct_document(node)


def read_yaml(path: FilePath, shown: str) -> Layer:
    """The mapping in a YAML file. `shown` is the file's name in messages.

    Raises ConfigError, with `shown:line`, for text that is not YAML, a key given twice, or a root that is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("the config is not UTF-8 text", where=f"{shown}:{line}") from error
    except OSError as error:
        raise ConfigError(f"the config cannot be read: {error.strerror}", where=shown) from error
    try:
        return _read_node(_Loader(text), shown)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{shown}:{mark.line + 1}" if mark else shown
        raise ConfigError(_problem(error), where=place, hint=_cure(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", where=shown) from error
    except RecursionError as error:
        raise ConfigError("the config is nested too deeply", where=shown) from error


def _problem(error: yaml.MarkedYAMLError) -> str:
    if error.problem == "but found another document":
        return "the config holds more than one YAML document"
    return error.problem or "not YAML"


def _cure(error: yaml.MarkedYAMLError) -> str | None:
    if "\\t" in (error.problem or ""):
        return "indent with spaces"
    return None


def _read_node(loader: _Loader, shown: str) -> Layer:
    node = loader.get_single_node()
    if node is None:
        return Layer({}, {(): f"{shown}:1"})
    layer = Layer()
    _Walk(loader, shown, layer.marks).visit(node, (), ())
    data = loader.construct_document(node)
    if not isinstance(data, dict):
        raise ConfigError(
            f"the config is {_kind(data)}, not a mapping of keys to values",
            where=f"{shown}:{node.start_mark.line + 1}",
            allowed="lines such as `lr: 1.0e-4`",
        )
    layer.data = data
    return layer


def _kind(data: Any) -> str:
    return "a list" if isinstance(data, list) else f"`{data}`"


class _Walk:
    """Fills `marks` with the line of every value, and refuses anchors that contain themselves or explode."""

    def __init__(self, loader: _Loader, shown: str, marks: dict[Path, str]) -> None:
        self._loader, self._shown, self._marks, self._count = loader, shown, marks, 0

    def visit(self, node: yaml.Node, path: Path, above: tuple[int, ...]) -> None:
        inside = self._enter(node, above)
        self._marks.setdefault(path, f"{self._shown}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path, inside)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index), inside)

    def _enter(self, node: yaml.Node, above: tuple[int, ...]) -> tuple[int, ...]:
        self._count += 1
        if id(node) in above or self._count > MAX_VALUES:
            problem = "an anchor contains itself" if id(node) in above else f"more than {MAX_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return (*above, id(node))

    def _visit_mapping(self, node: yaml.MappingNode, path: Path, inside: tuple[int, ...]) -> None:
        # Keys that are merged in (`<<`) come last: the mapping's own keys win, here as in PyYAML.
        for key_node, value in sorted(node.value, key=lambda pair: bool(pair[0].tag == _MERGE)):
            if key_node.tag == _MERGE:
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(part, yaml.MappingNode):
                        self._visit_mapping(part, path, self._enter(part, inside))
                continue
            key = self._loader.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise yaml.MarkedYAMLError(
                    problem=f"`{key}` is no name of a key; write it in quotes", problem_mark=key_node.start_mark
                )
            self._marks.setdefault((*path, key), f"{self._shown}:{key_node.start_mark.line + 1}")
            self.visit(value, (*path, key), inside)
