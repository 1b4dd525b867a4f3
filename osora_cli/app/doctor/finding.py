"""One thing that the doctor looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "absent", "warn", "fail"]
Check = Callable[[], Iterable["Finding"]]


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        name: what was looked at.
        status: `absent`: an optional part that is not here; `warn`: works, but costs something; `fail`: will not work.
        text: the figure or fact.
        cure: what to do; None where there is nothing to do.
        values: figures by name, for JSON.
    """

    name: str
    status: Status
    text: str
    cure: str | None = None
    values: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "text": self.text,
            "cure": self.cure,
            "values": self.values or {},
        }


def guarded(name: str, check: Check) -> list[Finding]:
    """The findings of a check; a check that breaks is a finding itself, the others go on."""
    try:
        return list(check())
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        return [Finding(name, "fail", f"the check itself failed: {type(error).__name__}: {reason}")]
