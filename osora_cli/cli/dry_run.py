"""A dry run as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osora_cli.app.dry_run.estimate import KINDS
from osora_cli.cli.results import duration, size, table
from osora_cli.words import counted

_GIB = 2**30


def dry_run_lines(result: Mapping[str, Any]) -> list[str]:
    """Parameters, memory by kind, updates, checkpoints, and what will not work as it is."""
    memory, saves = result["memory_bytes"], result["saves"]
    shape = memory["shape"]
    networks = [
        (network["name"], f"{network['parameters']:,} parameters, {network['trained']:,} trained")
        for network in result["networks"]
    ]
    where = "a GPU" if result["ranks"] == 1 else f"each of {result['ranks']} GPUs"
    unit, name = (_GIB, "GiB") if memory["total"] >= _GIB else (2**20, "MiB")  # as GPUs are sold; one for all rows
    held = [(label, f"{memory[key] / unit:8.2f} {name}") for key, label in KINDS.items() if memory[key]]
    total = f"{memory['total'] / unit:8.2f} {name}"
    if result["gpu_bytes"]:
        total += f" of {result['gpu_bytes'] / _GIB:.1f} GiB"
    lines = [
        *table([("folder", result["folder"]), *networks]),
        "",
        f"memory of {where}, for {shape['clips']} x {shape['frames']} frames of {shape['height']}x{shape['width']}:",
        *(f"  {line}" for line in table([*held, ("in all", total)])),
    ]
    if memory["save_buffers"]:
        lines.append(f"  and {size(memory['save_buffers'])} of the host's memory while a checkpoint is written")
    return [*lines, "", *table(_plan(result, saves)), *(f"warning: {text}" for text in result["warnings"])]


def _plan(result: Mapping[str, Any], saves: Mapping[str, Any]) -> list[tuple[str, Any]]:
    each = f"{size(saves['bytes_each'])} each"
    if saves["seconds_each"] is not None:
        each += f", durable after about {duration(saves['seconds_each'])}"
    room = f"up to {size(saves['bytes_at_most'])}, {size(saves['free_bytes'])} are free"
    return [
        (
            "updates",
            f"{result['updates']:,}, {counted(result['batches_per_epoch'], 'batch', 'batches')} an epoch and rank",
        ),
        ("checkpoints", f"{saves['count']:,}, of which {saves['kept']:,} stay; {each}"),
        ("disk", room),
    ]
