"""Random draws that depend on what they are for, and on nothing else.

A draw for a sample is a hash of (seed, epoch, position, purpose), so any worker of any rank makes the same one, and a
resumed run makes it again: no generator's state has to be carried, saved or restored.
"""

from __future__ import annotations

import operator
import random

import xxhash


def draw_seed(*parts: int | str) -> int:
    """A 64-bit unsigned seed that is a function of `parts` alone.

    Parts are kept apart and typed: `(1, 23)`, `(12, 3)`, `("1", 23)` and `("12", 3)` all differ. Integers may have any
    size and sign, and may be numpy's; anything else but text raises TypeError. Uses XXH64, so the value is the same on
    every machine and Python.
    """
    hashed = xxhash.xxh64()
    for part in parts:
        if isinstance(part, str):
            text = part.encode("utf-8", "surrogatepass")
            hashed.update(b"s%d:" % len(text))
            hashed.update(text)
        else:
            hashed.update(b"i%d;" % operator.index(part))
    return hashed.intdigest()


def draw_rng(*parts: int | str) -> random.Random:
    """A generator of Python's own kind, seeded with `draw_seed(*parts)`."""
    return random.Random(draw_seed(*parts))
