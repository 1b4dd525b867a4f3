"""Tables of clips for tests: written as CSV and read back as the product reads them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from osora_cli.data.media import probe
from osora_cli.data.table import COLUMNS, ClipTable


def clip_row(path: Path, text: str | None = None, **values: Any) -> dict[str, Any]:
    """A row of what the file is; `values` say otherwise."""
    info = probe(path)
    facts = {"num_frames": info.num_frames, "height": info.height, "width": info.width, "fps": info.fps, **values}
    return raw_row(path, path.stem if text is None else text, **facts)


def raw_row(path: Path | str, text: str, num_frames: int, height: int, width: int, fps: float) -> dict[str, Any]:
    """A row whose file is not looked at."""
    return {
        "path": str(path),
        "text": text,
        "num_frames": num_frames,
        "height": height,
        "width": width,
        "aspect_ratio": height / width,
        "resolution": height * width,
        "fps": "" if math.isnan(fps) else fps,
    }


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *(name for name in rows[0] if name not in COLUMNS)])
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> ClipTable:
    return ClipTable.load(write_table(folder / "table.csv", rows))
