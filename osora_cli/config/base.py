"""The base of every config section: unknown keys are errors, and each field carries one line of help."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of a config. Defaults live here and nowhere else."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, protected_namespaces=(), hide_input_in_errors=False
    )


def _no_bool(value: Any) -> Any:
    # pydantic takes True for 1; in a config that is always a slip.
    if isinstance(value, bool):
        raise ValueError(f"`{value}` is a truth value, a number is needed")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
