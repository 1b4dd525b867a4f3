"""docs/config-reference.md: current, and with every key of every command in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from osora_cli.config.fields import walk
from osora_cli.config.reference import COMMAND, parts, reference
from osora_cli.config.registry import COMMANDS

FILE = Path(__file__).resolve().parents[3] / "docs" / "config-reference.md"


def test_the_committed_file_is_current() -> None:
    if FILE.read_text() != reference():
        pytest.fail(f"docs/config-reference.md is not current; make it again with: {COMMAND}", pytrace=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_a_command_is_in_its_chapters(name: str) -> None:
    schema = COMMANDS[name].schema
    listed = set(re.findall(r"^\| `([\w.]+)` \|", reference(), re.MULTILINE))
    for part in parts():
        if len(part.keys) > 1:  # its rows stand below several keys, and so without them
            listed |= {f"{key}.{spec.key}" for key in part.keys for spec in walk(part.schema)}
    missing = {spec.key for spec in walk(schema)} - listed
    assert missing == set()


def test_titles_are_unique() -> None:
    titles = [part.title for part in parts()]
    assert len(set(titles)) == len(titles)
    heads = re.findall(r"^#+ (.*)$", reference(), re.MULTILINE)
    assert len(set(heads)) == len(heads)
