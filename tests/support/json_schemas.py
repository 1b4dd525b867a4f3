"""The shapes of `--json`: which schema in tests/cli/schemas each command's output is valid against."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).resolve().parents[1] / "cli" / "schemas"
_TRAINING = ("train", "dry-run", "print-config")
# What each command may print; `error` may come from any of them.
SHAPES: dict[str, tuple[str, ...]] = {
    "data meta": ("data-meta",),
    "data check": ("data-check",),
    "data cache": ("data-cache",),
    "data latent-stats": ("data-latent-stats",),
    "train vae": _TRAINING,
    "train vae-disc": _TRAINING,
    "train diffusion": _TRAINING,
    "resume": ("train", "print-config"),
    "infer reconstruct": ("infer-reconstruct", "print-config"),
    "ckpt verify": ("ckpt-verify-run", "ckpt-verify-checkpoint"),
    "ckpt list": ("ckpt-list",),
    "ckpt export": ("ckpt-export",),
    "ckpt prune": ("ckpt-prune",),
    "weights list": ("weights-list",),
    "weights fetch": ("weights-fetch",),
    "config show": ("config-commands", "config-show"),
    "config convert": ("config-convert",),
    "report": ("report",),
    "doctor": ("doctor",),
    "demo": ("demo",),
}
BESIDE = ("error", "version")


@cache
def schema(name: str) -> dict[str, Any]:
    """The schema of that name, itself checked."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    Draft202012Validator.check_schema(found)
    assert isinstance(found, dict)
    return found


def check(name: str, payload: Any) -> None:
    """Raises AssertionError with everything that does not fit, by place."""
    faults = sorted(
        Draft202012Validator(schema(name)).iter_errors(payload), key=lambda fault: list(fault.absolute_path)
    )
    assert not faults, f"{name}: " + "; ".join(f"{fault.json_path}: {fault.message[:300]}" for fault in faults)
