"""A table of small clips and a diffusion config over it, for what is cached, measured and sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.clips import make_clip
from support.tiny_diffusion import CONFIG

from osora_cli.config.diffusion import TrainDiffusionConfig


def make_table(folder: Path, clips: int = 4, frames: int = 8, name: str = "clip") -> Path:
    """A table with clips of `frames` frames each; with as many as the bucket wants, each has one window."""
    rows = ["path,text,num_frames,height,width,aspect_ratio,resolution,fps"]
    for i in range(clips):
        make_clip(folder / f"{name}{i}.mp4", frames=frames, first=1 + 97 * i)
        rows.append(f"{name}{i}.mp4,a clip numbered {i},{frames},64,96,{64 / 96},6144,24.0")
    table = folder / f"{name}s.csv"
    table.write_text("\n".join(rows) + "\n")
    return table


def cache_config(table: Path, **changes: Any) -> TrainDiffusionConfig:
    """The tiny config over a table on the CPU, with top-level values replaced; `dataset` is merged."""
    values = json.loads(json.dumps({**CONFIG, "device": "cpu", "plugin": "none", **changes}))
    values["dataset"] = {**CONFIG["dataset"], **values["dataset"], "data_path": str(table)}
    return TrainDiffusionConfig.model_validate(values)
