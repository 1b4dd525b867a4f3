"""Results of `osora ckpt list`, `export` and `prune` as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osora_cli.cli.results import duration, size, table
from osora_cli.words import counted


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def list_lines(result: Mapping[str, Any]) -> list[str]:
    """A row a checkpoint, reasons below it, and the sum."""
    checkpoints = result["checkpoints"]
    if not checkpoints:
        return [f"no checkpoint in {result['run']}"]
    rows = [
        (
            row["name"],
            row["verdict"],
            size(row["bytes"]),
            (row["saved"] or "")[:16].replace("T", " "),
            ", ".join(row["marks"]),
            str(row["ranks"] or ""),
            row["writer"] or "",
            " ".join(row["parts"]),
        )
        for row in checkpoints
    ]
    lines = _columns(("checkpoint", "structure", "size", "saved (UTC)", "", "ranks", "writer", "parts"), rows)
    lines += [f"{row['name']}: {row['reason']}" for row in checkpoints if row["reason"]]
    return [*lines, f"{counted(len(checkpoints), 'checkpoint')}, {size(result['bytes'])}"]


def export_lines(result: Mapping[str, Any]) -> list[str]:
    """What was written and from where."""
    dtype = "" if result["dtype"] == "same" else f" as {result['dtype']}"
    return table(
        [
            ("checkpoint", f"{result['checkpoint']} ({result['verdict']})"),
            ("weights", f"{result['weights']}{dtype}, {counted(result['tensors'], 'tensor')}"),
            ("output", result["output"]),
            ("files", len(result["files"]) if len(result["files"]) > 1 else None),
            ("size", size(result["bytes"])),
            ("time", duration(float(result["seconds"]))),
        ]
    )


def prune_lines(result: Mapping[str, Any]) -> list[str]:
    """What becomes of each checkpoint, and how much room that makes."""
    if not result["checkpoints"]:
        return [f"no checkpoint in {result['run']}"]
    removed = [row for row in result["checkpoints"] if row["action"] == "remove"]
    done = {"keep": "keep", "remove": "removed" if result["done"] else "would remove"}
    lines = _columns(
        ("checkpoint", "", "size", "why"),
        [(row["name"], done[row["action"]], size(row["bytes"]), row["why"]) for row in result["checkpoints"]],
    )
    what = "removed" if result["done"] else "would remove"
    lines.append(
        f"{what} {len(removed)} of {counted(len(result['checkpoints']), 'checkpoint')}, {size(result['bytes'])}"
    )
    if removed and not result["done"]:
        lines.append("nothing was done yet: add `--yes`")
    return lines
