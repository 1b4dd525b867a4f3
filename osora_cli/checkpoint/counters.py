"""The five counters of `running_states.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from osora_cli.checkpoint.layout import folder_name

FIELDS = ("epoch", "step", "global_step", "batch_size", "actual_update_step")


@dataclass(frozen=True)
class Counters:
    """How far a run has come.

    Attributes:
        epoch: pass over the table, from 0.
        step: micro-batches done in this epoch.
        global_step: micro-batches done in all.
        batch_size: samples per micro-batch, None where it differs between buckets.
        actual_update_step: optimizer updates done in all; the number in the folder's name.
    """

    epoch: int
    step: int
    global_step: int
    batch_size: int | None
    actual_update_step: int

    @property
    def folder(self) -> str:
        return folder_name(self.epoch, self.actual_update_step)

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)

    def to_json(self) -> bytes:
        return (json.dumps(self.to_dict(), indent=4) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Counters:
        """Read `running_states.json`.

        Raises:
            ValueError: no JSON object, a field missing, unknown, or no count; the message names it.
        """
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Counters:
        """As `from_json`, of the parsed object."""
        if not isinstance(data, dict):
            raise ValueError("is no JSON object")
        missing = [name for name in FIELDS if name not in data]
        extra = sorted(str(name) for name in data if name not in FIELDS)
        if missing:
            raise ValueError(f"lacks the fields {_names(missing)}")
        if extra:
            raise ValueError(f"has the unknown fields {_names(extra)}")
        for name in FIELDS:
            value = data[name]
            if name == "batch_size" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"has {name} = `{value!r}`, not a count")
        return cls(**{name: data[name] for name in FIELDS})


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
