"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 clip`, `1,200 clips`, `2 batches` (for a noun that takes more than an s, its plural)."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
