"""YAML with places: what is read, what is refused, and the line that each fault names."""

from __future__ import annotations

from pathlib import Path

import pytest

from osora_cli.config.source import MAX_VALUES, parse_inline, read_yaml
from osora_cli.errors import ConfigError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_value_has_its_line(tmp_path: Path) -> None:
    layer = read_yaml(write(tmp_path, "# head\na: 1\nb:\n  c: [1,\n    2]\n  'd.e': x\n"), "c.yaml")
    assert layer.data == {"a": 1, "b": {"c": [1, 2], "d.e": "x"}}
    assert layer.marks[("a",)] == "c.yaml:2"
    assert layer.marks[("b",)] == "c.yaml:3"
    assert layer.marks[("b", "c")] == "c.yaml:4"
    assert layer.marks[("b", "c", 1)] == "c.yaml:5"
    assert layer.marks[("b", "d.e")] == "c.yaml:6"
    assert layer.where(("b", "c", 7)) == "c.yaml:4", "an unknown path takes the place of what is around it"


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key `a` is given twice, first in line 1", 3),
        ("x:\n  a: 1\n  a: 1\n", "the key `a` is given twice, first in line 2", 3),
        ("x: {1: a, 1: b}\n", "the key `1` is given twice, first in line 1", 1),
        ("- 1\n- 2\n", "the config is a list, not a mapping", 1),
        ("# x\n\njust words\n", "the config is `just words`, not a mapping", 3),
        ("a:\n\tb: 1\n", "found character '\\t'", 2),
        ("a: [1, 2\nb: 3\n", "expected ',' or ']'", 2),
        ("a: 1\n  b: 2\n", "mapping values are not allowed here", 2),
        ("a: !!python/object:os.system x\n", "could not determine a constructor", 1),
        ("yes: 1\n", "`True` is no name of a key", 1),
        ("a: &x [*x]\n", "an anchor contains itself", 1),
        ("a: &x {<<: *x}\n", "an anchor contains itself", 1),
        ("a: *nowhere\n", "found undefined alias", 1),
        ("? [1, 2]\n: 3\n", "is no name of a key", 1),
        ("a: 1\nb: " + "1" * 5000 + "\n", "`11111111111111111111...` is no number that can be read", 2),
        ("a: 1\nb: !!binary aGVsbG8=\n", "could not determine a constructor", 2),
        ("a: 1\n---\na: 2\n", "more than one YAML document", 2),
    ],
)
def test_faults_name_their_line(tmp_path: Path, text: str, message: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(tmp_path, text), "c.yaml")
    assert message in caught.value.message
    assert caught.value.where == f"c.yaml:{line}"
    assert caught.value.exit_code == 2


def test_a_tab_is_cured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(tmp_path, "a:\n\tb: 1\n"), "c.yaml")
    assert caught.value.hint == "indent with spaces"


def test_text_that_is_not_utf8_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        read_yaml(write(tmp_path, b"a: 1\nb: \xff\xfe\n"), "c.yaml")
    assert caught.value.where == "c.yaml:2"
    with pytest.raises(ConfigError, match="special characters are not allowed"):
        read_yaml(write(tmp_path, "a: \x00\n"), "c.yaml")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "\ufeffa: 1\n".encode()), "c.yaml").data == {"a": 1}


def test_an_empty_file_is_an_empty_config(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "# nothing\n"), "c.yaml").data == {}


def test_bombs_and_depth_end_in_an_error(tmp_path: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for name, inner in ("ba", "cb", "dc", "ed", "fe"):
        bomb += f"{name}: &{name} [{', '.join(['*' + inner] * 10)}]\n"
    with pytest.raises(ConfigError, match=f"more than {MAX_VALUES} values"):
        read_yaml(write(tmp_path, bomb), "c.yaml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_yaml(write(tmp_path, "a: " + "[" * 5000 + "]" * 5000), "c.yaml")


def test_anchors_and_merge_keys_work_and_keep_their_places(tmp_path: Path) -> None:
    layer = read_yaml(write(tmp_path, "base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n"), "c.yaml")
    assert layer.data["more"] == {"x": 1, "y": 3}
    assert layer.marks[("more", "x")] == "c.yaml:1"
    assert layer.marks[("more", "y")] == "c.yaml:4"


def test_inline_values() -> None:
    assert parse_inline('{"a": [1, 2.5, null, true]}') == {"a": [1, 2.5, None, True]}
    assert parse_inline("{256px: {1: [1.0, 2]}}") == {"256px": {1: [1.0, 2]}}


@pytest.mark.parametrize("text", ["1:30", "-1:30", "190:20:30", "1:30.5"])
def test_no_number_has_base_60(tmp_path: Path, text: str) -> None:
    assert parse_inline(text) == text
    (tmp_path / "a.yaml").write_text(f"a: {text}\nb: [16:9, 30, -2.5, 0x1F]\n")
    assert read_yaml(tmp_path / "a.yaml", "a.yaml").data == {"a": text, "b": ["16:9", 30, -2.5, 31]}
