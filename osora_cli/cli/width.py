"""Lines of a result on a terminal: what is wider than it goes on below its second column, and nothing is cut off."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

_LEAST = 20  # columns; narrower than this nothing is gained
_SECOND_COLUMN = re.compile(r"\s*\S+(?: \S+)*  +(?=\S)")


def terminal_columns() -> int:
    """Of the terminal behind stdout; COLUMNS goes first, 80 where nothing is known."""
    return max(_LEAST, shutil.get_terminal_size().columns)


def fitted(lines: Sequence[str], columns: int) -> list[str]:
    """The lines with those longer than `columns` broken between words. A word that is longer itself stays whole, for it
    is a path or a command."""
    return [part for line in lines for whole in line.split("\n") for part in _broken(whole, columns)]


def _broken(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    found = _SECOND_COLUMN.match(line)
    own = len(line) - len(line.lstrip())
    indent = found.end() if found is not None and found.end() <= columns // 2 else own + 2
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [line]  # fmt: skip
