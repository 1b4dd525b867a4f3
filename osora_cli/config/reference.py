"""Every key of every config as one Markdown document: docs/config-reference.md, made from the schema.

python -m osora_cli.config.reference > docs/config-reference.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from osora_cli.config.base import Section
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.fields import FieldSpec, sections_of, walk
from osora_cli.config.freeze import plain_text
from osora_cli.config.registry import COMMANDS
from osora_cli.config.schema import LoaderConfig, ReconstructConfig, TrainConfig, TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig

COMMAND = "python -m osora_cli.config.reference > docs/config-reference.md"
# Each class adds keys to those of the class that it is made from; a chapter lists what it adds.
CHAPTERS: dict[type[Section], str] = {
    LoaderConfig: "Every command with a config",
    TrainConfig: "Every training",
    TrainVaeConfig: "Both trainings of an autoencoder",
    TrainVaeDiscConfig: "`osora train vae-disc`",
    TrainDiffusionConfig: "`osora train diffusion`",
    ReconstructConfig: "`osora infer reconstruct`",
}
SHARED = "Sections of several chapters"
_INTRODUCTION = f"""# Every key of a config

`osora config show train-vae` says the same on the terminal, `osora config show train-vae optim` one section of it. This
file is made from the schema by

    {COMMAND}

Each key is an option too, `-` or `_` alike: `--optim.lr 1e-4`, `--async-io`, `--no-async-io`,
`--optim.betas '[0.9, 0.98]'`. The command line wins over the config, the config over its `_base_`, and that over the
defaults below. Presets set other values than the defaults: `--print-config` behind a command's line prints what it
would run with. An unknown key is refused with the nearest name.

| command | preset when no CONFIG is given | its keys are those of |
|---|---|---|
"""


@dataclass
class Part:
    """A section of the schema: under which keys it stands, in which chapters, and its name where a key has several."""

    schema: type[Section]
    keys: list[str] = field(default_factory=list)
    chapters: list[type[Section]] = field(default_factory=list)
    kind: str = ""

    @property
    def title(self) -> str:
        names = ", ".join(f"`{key}`" for key in self.keys)
        return f"{names} with `type: {self.kind}`" if self.kind else names


def reference() -> str:
    """The document, with a line break at its end."""
    text = _INTRODUCTION + "\n".join(_command_row(name) for name in COMMANDS) + "\n"
    for chapter, title in CHAPTERS.items():
        text += f"\n## {title}\n\n{_table(_own_fields(chapter))}"
        text += "".join(_part_text(part) for part in parts() if part.chapters == [chapter])
    text += f"\n## {SHARED}\n"
    return text + "".join(_part_text(part) for part in parts() if len(part.chapters) > 1)


@cache
def parts() -> tuple[Part, ...]:
    """The sections in the order in which the chapters come to them."""
    found: dict[type[Section], Part] = {}
    for chapter in CHAPTERS:
        for spec in _own_fields(chapter):
            for schema in sections_of(spec.annotation):
                part = found.setdefault(schema, Part(schema))
                part.keys += [spec.key] if spec.key not in part.keys else []
                part.chapters += [chapter] if chapter not in part.chapters else []
    keys = [key for part in found.values() for key in part.keys]
    for part in found.values():
        if any(keys.count(key) > 1 for key in part.keys):
            part.kind = str(part.schema.model_fields["type"].default)
    return tuple(found.values())


def _own_fields(chapter: type[Section]) -> list[FieldSpec]:
    """The top-level fields that a class adds to those of the class that it is made from, or declares anew."""
    return [spec for spec in walk(chapter) if len(spec.path) == 1 and spec.key in chapter.__annotations__]


def _command_row(name: str) -> str:
    command = COMMANDS[name]
    chapters = [title for chapter, title in CHAPTERS.items() if issubclass(command.schema, chapter)]
    return f"| `osora {name}` | `{command.default}` | {'; '.join(_link(title) for title in chapters)} |"


def _part_text(part: Part) -> str:
    prefix = f"{part.keys[0]}." if len(part.keys) == 1 else ""
    leaves = [spec for spec in walk(part.schema) if not sections_of(spec.annotation)]
    return f"\n### {part.title}\n\n{_sentence(part.schema)}\n\n{_table(leaves, prefix)}"


def _sentence(schema: type[Section]) -> str:
    return " ".join((schema.__doc__ or "").split())


def _table(specs: Sequence[FieldSpec], prefix: str = "") -> str:
    return "\n".join(["| key | values | default | |", "|---|---|---|---|", *_rows(specs, prefix)]) + "\n"


def _rows(specs: Sequence[FieldSpec], prefix: str) -> Iterator[str]:
    for spec in specs:
        inner = sections_of(spec.annotation)
        if inner:
            links = [_link(part.title, spec.key) for part in parts() if part.schema in inner]
            values, default = f"section {' or '.join(links)}", "required" if spec.required else ""
        else:
            values, default = spec.type_text, "required" if spec.required else f"`{plain_text(spec.default)}`"
        yield f"| `{prefix}{spec.key}` | {_cell(values)} | {_cell(default)} | {_cell(spec.help)} |"


def _link(title: str, key: str = "") -> str:
    """A link to the chapter or section of that title; a section is called by the key at hand."""
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    _, kind_mark, kind = title.partition(" with ")
    shown = (f"`{key}`{kind_mark}{kind}") if key else title
    return f"[{shown}](#{anchor})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
