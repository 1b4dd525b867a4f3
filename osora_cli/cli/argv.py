"""From argv to the command it names and what that command gets: the step before Typer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from osora_cli.errors import UsageError

if TYPE_CHECKING:
    from osora_cli.cli.overrides import OwnOption
    from osora_cli.config.base import Section
    from osora_cli.config.overrides import Override

HELP_WORDS = ("-h", "--help")
# Commands that any training's keys may follow: the run, or the config, says which they are.
_ANY_TRAINING = ("resume", "data check")
# Commands that take another's config.
_SAME_CONFIG = {"data cache": "train diffusion", "data latent-stats": "train diffusion"}
# Options of every command, which ask for nothing by themselves.
_EVERYWHERE = ("--json", "--quiet", "--debug")
_EMPTY_OPTION = re.compile(r"--[a-z-]+=")
_ALIASES = {"from-pretrained": "model.from_pretrained"}


@dataclass
class Invocation:
    """A command of Typer's, what it is called with, and the values for the config that it does not see.

    The command is called by itself, not through its groups: their own parsing would only cost time.
    """

    command: Any
    name: str
    argv: list[str]
    overrides: list[Override] = field(default_factory=list)


def has_flag(words: Sequence[str], name: str) -> bool:
    """Whether a flag stands in argv, before any `--` and not as `False`. Needed before argv has been taken apart."""
    own = _before_dashes(words)
    return any(
        word == f"{name}=True" or (word == name and not _is_false(own[index + 1 : index + 2]))
        for index, word in enumerate(own)
    )


def _is_false(following: Sequence[str]) -> bool:
    return bool(following) and following[0].lower() in ("false", "no", "off", "0")


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def plan_invocation(root: Any, words: Sequence[str]) -> Invocation:
    """Find the command in `words` and take its line apart.

    Args:
        root: the command that Typer makes of the application.
        words: argv without the program's name. Options may stand anywhere, before the command's name too.

    Raises UsageError for a command that does not exist, and all that `fold` raises.
    """
    node, names, rest = _find_command(root, list(words))
    own = _before_dashes(words)
    if any(word in HELP_WORDS for word in own):
        return Invocation(node, _program(names), ["--help"])
    if "--version" in own:
        return Invocation(root, "osora", ["--version", *(["--json"] if has_flag(words, "--json") else [])])
    if not hasattr(node, "commands"):
        return _command_invocation(node, names, rest)
    if names:
        program = _program(names)
        raise UsageError(f"`{program}` needs a command", allowed=", ".join(node.commands), hint=f"`{program} --help`")
    if not rest:
        return Invocation(root, "osora", ["--help"])
    if all(word.partition("=")[0] in _EVERYWHERE or not word.startswith("-") for word in rest):
        raise UsageError("no command is given", allowed=", ".join(node.commands), hint="`osora --help`")
    return _command_invocation(node, names, rest)


def _find_command(root: Any, words: list[str]) -> tuple[Any, list[str], list[str]]:
    node, names, rest = root, list[str](), list[str]()
    while words and hasattr(node, "commands"):
        word = words.pop(0)
        if word == "--":
            return node, names, [*rest, word, *words]
        if word.startswith("-"):
            rest.append(word)
            continue
        name = word.replace("_", "-")
        if name not in node.commands:
            raise _no_command(word, names, list(node.commands))
        node = node.commands[name]
        names.append(name)
    return node, names, rest + words


def _program(names: Sequence[str]) -> str:
    return " ".join(("osora", *names))


def _no_command(word: str, names: Sequence[str], known: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(word.replace("_", "-"), known, n=1, cutoff=0.6)
    program = _program(names)
    return UsageError(
        f"`{word}` is not a command of `{program}`",
        allowed=", ".join(known),
        hint=f"did you mean `{program} {near[0]}`?" if near else f"`{program} --help` says what each does",
    )


def _command_invocation(node: Any, names: list[str], rest: list[str]) -> Invocation:
    from osora_cli.cli.overrides import fold, looks_like_config

    command = " ".join(names)
    schemas, default = _schemas_of(command)
    group = default.rpartition("/")[0]

    def is_config(word: str) -> bool:
        from osora_cli.config.presets import is_preset

        return looks_like_config(word) or (bool(group) and is_preset(word, group))

    folded = fold(
        rest,
        own=_own_options(node),
        schemas=schemas,
        aliases=_ALIASES if schemas else {},
        is_config=is_config,
        max_arguments=sum(_arity(param) for param in node.params),
    )
    if any(word == "" or _EMPTY_OPTION.fullmatch(word) for word in folded.argv):
        raise UsageError(
            f"`{_program(names)}` is given an empty word",
            allowed="a path or a name",
            hint=f"`{_program(names)} --help`",
        )
    return Invocation(node, _program(names), folded.argv, folded.overrides)


def _arity(param: Any) -> int:
    if _dashed(param):
        return 0
    return int(param.nargs) if param.nargs > 0 else 1_000_000


def _schemas_of(command: str) -> tuple[list[type[Section]], str]:
    """The configs whose keys a command's line may hold, and its first preset."""
    known = (*_ANY_TRAINING, *_SAME_CONFIG, "train vae", "train vae-disc", "train diffusion", "infer reconstruct")
    if command not in known:
        return [], ""
    from osora_cli.config.registry import COMMANDS

    if command in _ANY_TRAINING:
        return [entry.schema for entry in COMMANDS.values() if entry.trains], ""
    command = _SAME_CONFIG.get(command, command)
    return [COMMANDS[command].schema], COMMANDS[command].default


def _own_options(node: Any) -> dict[str, OwnOption]:
    """The options that Typer knows for a command, by every spelling without its dashes."""
    from osora_cli.cli.overrides import OwnOption

    options: dict[str, OwnOption] = {}
    for param in node.params:
        for spelling in _dashed(param):
            name = max(_dashed(param), key=len)
            options[spelling.lstrip("-").replace("_", "-")] = OwnOption(name, bool(param.is_flag))
    return options


def _dashed(param: Any) -> list[str]:
    return [word for word in param.opts if word.startswith("-")]
