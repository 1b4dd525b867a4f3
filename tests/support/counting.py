"""Counting Python's own work, which unlike time is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(action: Callable[[], object]) -> int:
    """Functions that Python calls during `action`, its own and those written in C."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls
