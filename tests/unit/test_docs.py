"""Documents against the program: what README.md, docs/, the presets' headers and the help texts tell people to type.

Every command line must parse (its command, options and config keys exist, arguments suffice, presets are there, values
fit their fields), every option or key that is named must be one, and links must lead somewhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from osora_cli.cli.argv import Invocation, plan_invocation
from osora_cli.cli.main import app
from osora_cli.cli.overrides import looks_like_config
from osora_cli.config.fields import resolve, sections_of, walk
from osora_cli.config.layers import apply_overrides, read_layers
from osora_cli.config.load import check, find_config
from osora_cli.config.presets import find_preset
from osora_cli.config.registry import COMMANDS, Command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))
LAUNCHER = re.compile(r"\b(?:torchrun|colossalai run|python) .*?-m osora_cli\b")
# Options in the documents that belong to other programs, or that stand for any option.
FOREIGN = {"--no-deps", "--dir", "--tiny", "--nproc_per_node", "--key", "--a.b"}
SCHEMAS = [command.schema for command in COMMANDS.values()]


@dataclass(frozen=True)
class Line:
    """A command line in a document. `whole` when it can be typed as it stands; else it only names a command."""

    where: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.where} {' '.join(self.words)}"


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


# ---- what the documents say ------------------------------------------------------------------------------------------


def blocks_and_prose(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(line number, text) of the lines of code blocks, continued lines joined, and of the prose."""
    code, prose = list[tuple[int, str]](), list[tuple[int, str]]()
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            prose.append((number, line))
        elif code and code[-1][1].endswith("\\"):
            code[-1] = (code[-1][0], code[-1][1][:-1] + line.strip())
        else:
            code.append((number, line.strip()))
    return code, prose


def spans(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(line number, text) of each `span`, also of those that go over the end of a line."""
    text = "\n".join(line for _, line in prose)
    for found in re.finditer(r"`([^`]+)`", text):
        yield prose[text.count("\n", 0, found.start())][0], found[1].replace("\n", " ")


def split_command(text: str) -> list[list[str]]:
    """The words after `osora` of a line or span, without comment and placeholders; `a|b` names two commands."""
    text = LAUNCHER.sub("osora", text.removeprefix(".venv/bin/"))
    if not text.startswith("osora "):
        return []
    words = shlex.split(text, comments=True)[1:]
    if len(words) > 1 and words[1] == "...":  # `osora train ... --nproc 8`: any training
        words[1] = next(iter(root_command().commands[words[0]].commands))
    words = [word for word in words if word not in ("...", "&")]
    joined = re.sub(r" \| ", "|", " ".join(words[:4])).split(" ")
    for place, word in enumerate(joined[:2]):
        if "|" in word:
            return [[*joined[:place], option] for option in word.split("|")]
    return [[re.sub(r"^\[|\]$", "", word) for word in words]]


def lines_of(path: Path) -> Iterator[Line]:
    code, prose = blocks_and_prose(path.read_text())
    name = path.relative_to(ROOT).as_posix()
    for found, whole in ((code, True), (list(spans(prose)), False)):
        for number, text in found:
            # What a line is piped into is another program's.
            for words in split_command(text.partition(" | ")[0] if whole else text):
                if words:
                    yield Line(f"{name}:{number}", tuple(words), whole and "..." not in text)


def preset_lines() -> Iterator[Line]:
    for path in PRESETS:
        head = path.read_text().split("\n\n", 1)[0]
        text = re.sub(r"\\\n#\s*", "", head)
        for found in re.finditer(r"^# command:\s*(.*)$", text, re.MULTILINE):
            for words in split_command(found[1]):
                yield Line(path.relative_to(ROOT).as_posix(), tuple(words), whole="..." not in found[1])


def help_lines(node: Any = None, name: str = "osora") -> Iterator[Line]:
    node = node or root_command()
    for child, command in getattr(node, "commands", {}).items():
        yield from help_lines(command, f"{name} {child}")
    for text in (node.epilog or "").splitlines():
        if text.strip().startswith("osora "):
            # The last line of a command with a config says what it is for.
            told = re.sub(r" {2,}.*", "", text.strip())
            yield Line(f"{name} --help", tuple(split_command(told)[0]), whole=True)


LINES = [line for path in DOCUMENTS for line in lines_of(path)] + list(preset_lines()) + list(help_lines())


def test_the_documents_hold_commands() -> None:
    assert sum(line.whole for line in LINES) > 60
    assert {line.where.partition(":")[0] for line in LINES} >= {"README.md", "docs/diffusion.md", "docs/data.md"}


# ---- each of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES, ids=str)
def test_it_parses(line: Line) -> None:
    planned = plan_or_group(line)
    if planned is None:
        return
    if line.whole:
        context = planned.command.make_context(planned.name, list(planned.argv))
        if "config" in context.params:
            check_config(planned, context.params["config"])
    elif planned.overrides:
        check_config(planned, None)


def plan_or_group(line: Line) -> Invocation | None:
    """The command of a line; None for the bare name of a group, such as `osora ckpt`."""
    words = list(line.words)
    node = root_command()
    for word in words:
        node = getattr(node, "commands", {}).get(word)
    if node is not None and hasattr(node, "commands"):
        assert not line.whole, "a group needs a command"
        return None
    return plan_invocation(root_command(), words)


def check_config(planned: Invocation, config: str | None) -> None:
    """The values fit a config of the command: of the preset that is named, or else its first."""
    command = command_for(planned.name)
    if command is None:
        return
    group = command.default.rpartition("/")[0]
    if config is not None and not (looks_like_config(config) or config == "CONFIG" or config.isupper()):
        assert find_preset(config, group) is not None, f"`{config}` is no preset"
    if config is not None and config.startswith("configs/"):
        assert find_preset(config, group) is not None, f"`{config}` is not in configs/"
    named = config if config is not None and find_preset(config, group) else None
    path, _ = find_config(named, command.default, group)
    check(apply_overrides(read_layers(path, group), planned.overrides), command.schema, "the config")


def command_for(program: str) -> Command | None:
    name = program.removeprefix("osora ")
    return COMMANDS.get({"data cache": "train diffusion", "data latent-stats": "train diffusion"}.get(name, name))


def all_options(node: Any) -> set[str]:
    own = {word.replace("_", "-") for param in getattr(node, "params", []) for word in param.opts}
    own |= {word.replace("_", "-") for param in getattr(node, "params", []) for word in param.secondary_opts}
    return own.union(*(all_options(child) for child in getattr(node, "commands", {}).values()))


def is_option(word: str) -> bool:
    flag = word.partition("=")[0]
    known = all_options(root_command()) | {"--help", "-h", "--from-pretrained"}
    name = flag[2:]
    return (
        flag in FOREIGN
        or flag.replace("_", "-") in known
        or resolve(SCHEMAS, name) is not None
        or (name.startswith("no-") and resolve(SCHEMAS, name[3:]) is not None)
        or (name.startswith("no-") and f"--{name[3:]}" in known)
    )


OPTIONS = [
    (f"{path.relative_to(ROOT).as_posix()}:{number}", word)
    for path in DOCUMENTS
    for number, span in spans(blocks_and_prose(path.read_text())[1])
    for word in span.split()
    if word.startswith("--") and len(word) > 2 and not split_command(span)
]


@pytest.mark.parametrize(("where", "option"), OPTIONS, ids=lambda value: str(value))
def test_an_option_that_is_named_exists(where: str, option: str) -> None:
    assert is_option(option.strip("[](),;")), where


SECTIONS = {spec.path[0] for schema in SCHEMAS for spec in walk(schema) if sections_of(spec.annotation)}
KEYS = [
    (f"{path.relative_to(ROOT).as_posix()}:{number}", span.partition(":")[0])
    for path in DOCUMENTS
    for number, span in spans(blocks_and_prose(path.read_text())[1])
    if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+(: .*)?", span) and span.partition(".")[0] in SECTIONS
]


@pytest.mark.parametrize(("where", "key"), KEYS, ids=lambda value: str(value))
def test_a_key_that_is_named_exists(where: str, key: str) -> None:
    assert resolve(SCHEMAS, key) is not None, where


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else path.parent / name
        assert file.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", [*DOCUMENTS, *PRESETS], ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(r"\b(?:docs/[\w-]+\.md|configs/[\w/]+\.yaml|tests/[\w/]+\.py)\b", path.read_text()):
        assert (ROOT / name).is_file(), f"{path.name} names {name}"


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
