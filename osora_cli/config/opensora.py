"""Open-Sora's Python configs, parsed and never executed.

Read: assignments of literals, lists, tuples and dicts, `dict(...)`, `list(...)`, `tuple(...)`, names assigned
before, + - * / // % ** on them, and `_base_`. Everything else is refused with its line, so nothing is ever run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, NoReturn

from osora_cli.config.fields import Path
from osora_cli.config.source import MAX_VALUES, Layer
from osora_cli.errors import ConfigError

_ALLOWED = "assignments of numbers, texts, True, False, None, lists, tuples, dicts, and names assigned before"
_MAX_BITS = 1024
_MAX_LENGTH = 100_000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CALLS = ("dict", "list", "tuple")


def read_python(path: FilePath, shown: str) -> Layer:
    """The values that a Python config assigns. `shown` is the file's name in messages.

    Names that begin with an underscore (`_base_` excepted) are helpers of the file and no keys.

    Raises ConfigError, with `shown:line`, for text that is not Python and for anything that would have to be run.
    """
    try:
        source = path.read_bytes()
        tree = ast.parse(source, filename=shown)
    except OSError as error:
        raise ConfigError(f"the config cannot be read: {error.strerror}", where=shown) from error
    except SyntaxError as error:
        place = f"{shown}:{error.lineno}" if error.lineno else shown
        raise ConfigError(f"not a Python config: {error.msg}", where=place) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not a Python config: {error or 'it is nested too deeply'}", where=shown) from error
    reader = _Reader(shown)
    try:
        for statement in tree.body:
            reader.statement(statement)
    except RecursionError as error:
        raise ConfigError("the config is nested too deeply", where=shown) from error
    layer = Layer({}, {(): f"{shown}:1"})
    for name, (value, node) in reader.names.items():
        if name.startswith("_") and name != "_base_":
            continue
        layer.data[name] = value
        _mark(layer.marks, (name,), value, node, shown)
    return layer


class _Reader:
    """Evaluates the few kinds of expressions that a config is made of."""

    def __init__(self, shown: str) -> None:
        self.names: dict[str, tuple[Any, ast.expr]] = {}
        self._shown = shown
        self._count = 0

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return  # a text that stands alone is a comment
        if isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._assign(target, value, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self._value(node.value), node.value)
        elif not isinstance(node, ast.Pass):
            self._refuse(node, f"`{ast.unparse(node).splitlines()[0]}` would have to be run")

    def _assign(self, target: ast.expr, value: Any, node: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            self._refuse(target, f"`{ast.unparse(target)}` is no plain name")
        self.names[target.id] = (value, node)

    def _value(self, node: ast.expr) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            self._refuse(node, f"more than {MAX_VALUES} values")
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return node.value
            case ast.List() | ast.Tuple():
                return [item for part in node.elts for item in self._items(part)]
            case ast.Dict():
                return self._dict(node)
            case ast.Name():
                return self._name(node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                number = self._number(node.operand)
                return -number if isinstance(node.op, ast.USub) else number
            case ast.BinOp():
                return self._binary(node)
            case ast.Call(func=ast.Name(id="dict" | "list" | "tuple")):
                return self._call(node)
        return self._refuse(node, f"`{ast.unparse(node)}` would have to be run")

    def _items(self, node: ast.expr) -> list[Any]:
        if not isinstance(node, ast.Starred):
            return [self._value(node)]
        inner = self._value(node.value)
        return list(inner) if isinstance(inner, list) else self._refuse(node, f"`{ast.unparse(node)}` is no list")

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        own: set[Any] = set()
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            if key_node is None:
                out.update(self._expanded(value_node))
                continue
            key = self._value(key_node)
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                self._refuse(key_node, f"`{ast.unparse(key_node)}` is no name of a key")
            if key in own:
                self._refuse(key_node, f"the key `{key}` is given twice")
            own.add(key)
            out[key] = self._value(value_node)
        return out

    def _expanded(self, node: ast.expr) -> dict[Any, Any]:
        value = self._value(node)
        return value if isinstance(value, dict) else self._refuse(node, f"`{ast.unparse(node)}` is no dict")

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            self._refuse(node, f"`{node.id}` is not assigned before this line")
        value = self.names[node.id][0]
        self._weigh(value, node)
        return value

    def _weigh(self, value: Any, node: ast.expr) -> None:
        """Count what a name or a repetition stands for: names of names can explode."""
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in inner:
            self._count += 1
            if self._count > MAX_VALUES:
                self._refuse(node, f"more than {MAX_VALUES} values")
            self._weigh(item, node)

    def _number(self, node: ast.expr) -> int | float:
        value = self._value(node)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(node, f"`{ast.unparse(node)}` is no number")
        return value

    def _binary(self, node: ast.BinOp) -> Any:
        act = _BINARY.get(type(node.op))
        if act is None:
            self._refuse(node, f"`{ast.unparse(node)}` would have to be run")
        left, right = self._value(node.left), self._value(node.right)
        numbers = all(isinstance(v, (int, float)) for v in (left, right))
        joined = isinstance(node.op, ast.Add) and isinstance(left, (str, list)) and type(left) is type(right)
        repeated = isinstance(node.op, ast.Mult) and isinstance(left, (str, list)) and isinstance(right, int)
        if not (numbers or joined or repeated):
            self._refuse(node, f"`{ast.unparse(node)}` would have to be run")
        if isinstance(node.op, ast.Pow) and isinstance(right, int) and abs(right) > _MAX_BITS:
            self._refuse(node, f"`{ast.unparse(node)}` is too large")
        if repeated and len(left) * right > _MAX_LENGTH:
            self._refuse(node, f"`{ast.unparse(node)}` is too long")
        try:
            result = act(left, right)
        except (ArithmeticError, ValueError) as error:
            self._refuse(node, f"`{ast.unparse(node)}`: {error}")
        too_large = isinstance(result, int) and result.bit_length() > _MAX_BITS
        if too_large or isinstance(result, complex) or (isinstance(result, (str, list)) and len(result) > _MAX_LENGTH):
            self._refuse(node, f"`{ast.unparse(node)}` is no value of a config")
        self._weigh(result, node)
        return result

    def _call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Name)
        if node.func.id == "dict":
            if node.args:
                self._refuse(node, f"`{ast.unparse(node)}`: `dict` takes names here, dict(a=1)")
            out: dict[Any, Any] = {}
            for keyword in node.keywords:
                if keyword.arg is None:
                    out.update(self._expanded(keyword.value))
                else:
                    out[keyword.arg] = self._value(keyword.value)
            return out
        if node.keywords or len(node.args) > 1:
            self._refuse(node, f"`{ast.unparse(node)}` would have to be run")
        value = self._value(node.args[0]) if node.args else []
        return list(value) if isinstance(value, list) else self._refuse(node, f"`{ast.unparse(node)}` is no list")

    def _refuse(self, node: ast.AST, what: str) -> NoReturn:
        line = getattr(node, "lineno", None)
        raise ConfigError(
            f"{what}; a Python config is parsed, never executed",
            where=f"{self._shown}:{line}" if line else self._shown,
            allowed=_ALLOWED,
        )


def _mark(marks: dict[Path, str], path: Path, value: Any, node: ast.expr, shown: str) -> None:
    """The line of a value and of all below it; what a name stands for has the line where the name is used."""
    marks[path] = f"{shown}:{node.lineno}"
    below: dict[Any, ast.expr] = {}
    if isinstance(node, ast.Dict):
        below = {key.value: v for key, v in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}
    elif isinstance(node, ast.Call):
        below = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    elif isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(part, ast.Starred) for part in node.elts):
        below = dict(enumerate(node.elts))
    if isinstance(value, dict):
        for key, inner in value.items():
            _mark(marks, (*path, key), inner, below.get(key, node), shown)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _mark(marks, (*path, index), inner, below.get(index, node), shown)
