"""The list of faults in `cases.md` is whole, and the tests that it names are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (TESTS / "cases.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| row ")
]


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_kind_of_fault_stands_once() -> None:
    assert sorted(int(row[0]) for row in ROWS) == list(range(1, 85))
    assert all(len(row) == 3 and row[1] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_tests_exist(row: list[str]) -> None:
    names = row[2].split()
    assert names
    for name in names:
        file, _, function = name.partition("::")
        assert function.startswith("test_")
        assert function in _functions(TESTS / file), name
