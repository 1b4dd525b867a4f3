"""A training that takes a second: five small clips, an autoencoder of a few thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from support.clips import make_clip

CONFIG: dict[str, Any] = {
    "model": {
        "type": "dc_ae",
        "latent_channels": 4,
        "encoder": {"width_list": [8, 32], "depth_list": [1, 1], "block_type": ["ResBlock", "EViTS5_GLU"],
                    "temporal_downsample": [True, False]},
        "decoder": {"width_list": [8, 32], "depth_list": [1, 1], "block_type": ["ResBlock", "EViTS5_GLU"],
                    "temporal_upsample": [True, False]},
    },
    "dataset": {"data_path": "clips.csv", "fps_max": 24},
    "bucket_config": {"32px_ar1:1": {8: [1.0, 2]}},
    "num_workers": 0,
    "optim": {"lr": 1e-3, "betas": [0.9, 0.98]},
    "lr_scheduler": {"warmup_steps": 3},
    "dtype": "fp32",
    "seed": 7,
    "log_every": 1,
    "ckpt_every": 0,
    "ema_decay": 0.9,
    "vae_loss_config": {"perceptual_loss_weight": 0.0, "kl_loss_weight": 0.0},
}  # fmt: skip


def make_table(folder: Path, clips: int = 5, frames: int = 24) -> Path:
    """`clips.csv` in `folder` with its clips beside it, as `osora data meta` writes it."""
    rows = ["path,text,num_frames,height,width,aspect_ratio,resolution,fps"]
    for i in range(clips):
        make_clip(folder / f"clip{i}.mp4", frames=frames + i)
        rows.append(f"clip{i}.mp4,clip {i},{frames + i},64,96,{64 / 96},6144,24.0")
    table = folder / "clips.csv"
    table.write_text("\n".join(rows) + "\n")
    return table


def write_config(folder: Path, **changes: Any) -> Path:
    """`tiny.yaml` in `folder`: CONFIG with top-level values replaced."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps({**CONFIG, **changes})), sort_keys=False))
    return path


def records(run: Path) -> list[dict[str, Any]]:
    """The updates in metrics.jsonl, each without the times, which differ from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [r for r in lines if r.get("kind") != "save"]
    return [{k: v for k, v in r.items() if not k.endswith("_s") and k != "peak_memory_gib"} for r in lines]
