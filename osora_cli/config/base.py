"""The base of every config section: unknown keys are errors, and each field carries one line of help."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict


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


def _whole(value: Any) -> Any:
    # PyYAML reads `1e3` as text, the command line reads everything so.
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and "e" in value.lower() else value
    return _no_bool(value)


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_no_bool), AllowInfNan(False)]
