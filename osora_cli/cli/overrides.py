"""argv of one command, taken apart: its own options, its arguments, and values for the config.

Typer never sees a field of the config. `fold` takes those out of argv first, whatever their place, and gives back
what is left in the one spelling that Typer knows. It touches nothing but its arguments.

    --a.b-c V   --a.b_c=V     a value; `_` and `-` are the same
    --flag   --flag True|False   --no-flag     a truth value
    --load A B C              several values, up to the next option
    --lr=-1e-5   --seed -1    a value that begins with a dash: numbers as they are, others by `=`
    --                        only arguments follow
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from osora_cli.config.base import Section
from osora_cli.config.faults import ConfigFaults, Fault
from osora_cli.config.fields import Target, members, nearest, resolve, sections_of
from osora_cli.config.overrides import Override, is_switch, parse_value, takes_many, truth
from osora_cli.errors import UsageError

_NUMBER = re.compile(r"-(\d|\.\d|inf\b|nan\b)", re.IGNORECASE)
_CONFIG_SUFFIXES = (".yaml", ".yml", ".py")


@dataclass(frozen=True)
class OwnOption:
    """An option of the command itself. `name` is the spelling that Typer knows, such as `--print-config`."""

    name: str
    is_flag: bool


@dataclass
class Folded:
    """What `fold` makes of argv."""

    options: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        """For Typer: options first, then `--` and the arguments."""
        return [*self.options, "--", *self.arguments] if self.arguments else list(self.options)


def looks_like_config(word: str) -> bool:
    """Whether a word after `--load A B` is CONFIG and no longer a checkpoint."""
    return PurePath(word).suffix in _CONFIG_SUFFIXES


def fold(
    argv: Sequence[str],
    *,
    own: Mapping[str, OwnOption],
    schemas: Sequence[type[Section]] = (),
    aliases: Mapping[str, str] | None = None,
    is_config: Callable[[str], bool] = looks_like_config,
    max_arguments: int = 1,
) -> Folded:
    """Take argv (without the command's name) apart.

    Args:
        own: options of the command, by their names with `-` and without the leading dashes (`num-workers`, `h`).
        schemas: configs that the command may take; a key must be a field of one of them.
        aliases: short names of fields, `{"from-pretrained": "model.from_pretrained"}`.
        is_config: tells CONFIG from one more checkpoint after `--load A B`.
        max_arguments: most arguments that the command takes.

    Raises UsageError with everything that is wrong: unknown options (and the nearest known), values missing, a key
    given together with its short name and another value.
    """
    return _Folder(list(argv), own, schemas, aliases or {}, is_config).run(max_arguments)


class _Folder:
    def __init__(
        self,
        argv: list[str],
        own: Mapping[str, OwnOption],
        schemas: Sequence[type[Section]],
        aliases: Mapping[str, str],
        is_config: Callable[[str], bool],
    ) -> None:
        self._words, self._own, self._schemas, self._aliases = argv, own, schemas, aliases
        self._is_config = is_config
        self._out, self._faults = Folded(), list[Fault]()
        # A word that followed a switch and is no truth value: an argument, or a slip such as `--async-io Flase`.
        self._after_switch: dict[str, str] = {}

    def run(self, max_arguments: int) -> Folded:
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                self._out.arguments += self._words
                break
            if word.startswith("--"):
                self._option(word)
            elif word.startswith("-") and word != "-" and not _NUMBER.match(word):
                self._short(word)
            else:
                self._out.arguments.append(word)
        self._check_arguments(max_arguments)
        self._check_aliases()
        if self._faults:
            raise ConfigFaults(self._faults, "the command line")
        return self._out

    # ---- one option ---------------------------------------------------------------------------------------------

    def _option(self, word: str) -> None:
        flag, has_value, inline = word.partition("=")
        value = inline if has_value else None
        name = flag[2:].replace("_", "-")
        if name in self._own:
            self._own_option(self._own[name], flag, value)
            return
        target = self._target(flag[2:])
        if target is not None:
            self._field(target, flag, value)
            return
        positive = self._target(_without_no(flag[2:]))
        if positive is not None and is_switch(positive):
            self._negation(positive, flag, value)
            return
        self._unknown(flag, has_value=value is not None)

    def _target(self, dotted: str) -> Target | None:
        return resolve(self._schemas, self._aliases.get(dotted.replace("_", "-"), dotted)) if dotted else None

    def _own_option(self, option: OwnOption, flag: str, value: str | None) -> None:
        if not option.is_flag:
            text = self._next_value(flag) if value is None else value
            if text is not None:
                self._out.options.append(f"{option.name}={text}")
            return
        text = self._next_truth(flag) if value is None else value
        meaning = True if text is None else truth(text)
        if meaning is None:
            self._faults.append(Fault(f"`{flag}` is `{text}`", flag, "True or False"))
        elif meaning:
            self._out.options.append(option.name)
        else:
            self._out.options = [word for word in self._out.options if word != option.name]

    def _field(self, target: Target, flag: str, value: str | None) -> None:
        if value is not None:
            texts = [value]
        elif is_switch(target):
            texts = [self._next_truth(flag) or self._next_null(target) or "True"]
        elif takes_many(target):
            texts = self._next_values(flag)
        else:
            text = self._next_value(flag)
            texts = [] if text is None else [text]
        if texts:
            self._set(target, flag, texts)

    def _set(self, target: Target, flag: str, texts: list[str]) -> None:
        try:
            values = [parse_value(target, text, flag) for text in texts]
        except UsageError as error:
            self._faults.append(Fault(error.message, error.where, error.allowed, error.hint))
            return
        self._out.overrides.append(Override(target.path, values[0] if len(values) == 1 else values, flag))

    def _negation(self, target: Target, flag: str, value: str | None) -> None:
        following = self._words[0] if self._words else ""
        if value is not None or truth(following) is not None:
            given = following if value is None else value
            if value is None:
                self._words.pop(0)
            positive = "--" + _without_no(flag[2:])
            self._faults.append(
                Fault(f"`{flag}` takes no value, `{given}` follows it", flag, f"`{flag}`, or `{positive} {given}`")
            )
            return
        self._out.overrides.append(Override(target.path, False, flag))

    def _short(self, word: str) -> None:
        option = self._own.get(word[1:])
        if option is not None:
            self._own_option(option, word, None)
            return
        long = f"-{word}"
        known = self._target(word[1:].partition("=")[0]) or self._own.get(word[1:].partition("=")[0])
        self._take_stray_value()
        hint = f"did you mean `{long}`?" if known else None
        self._faults.append(Fault(f"`{word}` is not an option", "the command line", hint=hint))

    # ---- values that follow -------------------------------------------------------------------------------------

    def _is_value(self, word: str) -> bool:
        return not word.startswith("-") or word == "-" or _NUMBER.match(word) is not None

    def _next_value(self, flag: str) -> str | None:
        if self._words and self._is_value(self._words[0]):
            return self._words.pop(0)
        hint = None
        if self._words and self._words[0] != "--":
            hint = f"a value that begins with a dash is given as `{flag}={self._words[0]}`"
        self._faults.append(Fault(f"`{flag}` has no value", flag, hint=hint))
        return None

    def _next_values(self, flag: str) -> list[str]:
        first = self._next_value(flag)
        texts = [] if first is None else [first]
        while texts and self._words and self._is_value(self._words[0]) and not self._is_config(self._words[0]):
            texts.append(self._words.pop(0))
        return texts

    def _next_truth(self, flag: str) -> str | None:
        if not self._words or not self._is_value(self._words[0]):
            return None
        if truth(self._words[0]) is not None:
            return self._words.pop(0)
        self._after_switch.setdefault(self._words[0], flag)
        return None

    def _next_null(self, target: Target) -> str | None:
        if self._words and parse_value(target, self._words[0], "") is None:
            return self._words.pop(0)
        return None

    def _take_stray_value(self) -> None:
        """The word after an unknown option was meant as its value, not as an argument."""
        if self._words and self._is_value(self._words[0]) and not self._is_config(self._words[0]):
            self._words.pop(0)

    # ---- what is wrong ------------------------------------------------------------------------------------------

    def _unknown(self, flag: str, *, has_value: bool) -> None:
        if not has_value:
            self._take_stray_value()
        name = flag[2:]
        hint = None
        if name.replace("_", "-") == "config":
            hint = "CONFIG is given without a flag"
        else:
            near = self._nearest(name)
            if near:
                hint = f"did you mean `{near}`?"
        self._faults.append(
            Fault(f"`{flag}` is not an option", "the command line", None if hint else self._beside(name), hint)
        )

    def _beside(self, name: str) -> str | None:
        """The keys of the section that a dotted name begins with."""
        section = name.rpartition(".")[0]
        target = self._target(section) if section else None
        sections = [] if target is None else [s for a in target.annotations for s in sections_of(a)]
        keys = sorted({key for each in sections for key in each.model_fields})
        return f"keys of `{section}`: {', '.join(keys)}" if keys else None

    def _nearest(self, name: str) -> str | None:
        positive = self._target(_without_no(name))
        if positive is not None and any(type(None) in members(a) for a in positive.annotations):
            return f"--{_without_no(name)} None"
        known = [option for option in (*self._own, *self._aliases) if len(option) > 1]
        own = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
        if own:
            return f"--{own[0]}"
        near = nearest(name, self._schemas)
        return f"--{near.replace('_', '-')}" if near else None

    def _check_arguments(self, most: int) -> None:
        arguments = self._out.arguments
        if len(arguments) <= most:
            return
        slips = [word for word in arguments if word in self._after_switch][: len(arguments) - most]
        self._faults += [
            Fault(f"`{self._after_switch[word]}` is `{word}`", self._after_switch[word], "True or False")
            for word in slips
        ]
        for word in [word for word in arguments if word not in slips][most:]:
            key = word.partition("=")[0]
            hint = None
            if self._target(key) is not None or key.replace("_", "-") in self._own:
                hint = f"did you mean `--{word}`?"
            elif _is_number(word):
                hint = "a list is given in one word: `[0.9, 0.98]`"
            self._faults.append(Fault(f"`{word}` is one argument too many", "the command line", hint=hint))

    def _check_aliases(self) -> None:
        for alias, key in self._aliases.items():
            given = [o for o in self._out.overrides if o.key == key]
            short = [o for o in given if o.flag[2:].replace("_", "-") == alias]
            full = [o for o in given if o not in short]
            if short and full and short[-1].value != full[-1].value:
                message = (
                    f"`{short[-1].flag}` is `{short[-1].value}` and `{full[-1].flag}` is `{full[-1].value}`: "
                    f"they are the same setting"
                )
                self._faults.append(Fault(message, "the command line", hint="give one of them"))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _without_no(dotted: str) -> str:
    """The name without its `no-`, in front or in front of its last part; empty when there is none."""
    head, dot, leaf = dotted.rpartition(".")
    for prefix in ("no-", "no_"):
        if dotted.startswith(prefix):
            return dotted[len(prefix) :]
        if leaf.startswith(prefix):
            return head + dot + leaf[len(prefix) :]
    return ""
