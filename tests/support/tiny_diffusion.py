"""A diffusion training that takes a second: small clips, small autoencoders of both kinds, texts by hashed n-grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

DC_AE: dict[str, Any] = {
    "type": "dc_ae",
    "latent_channels": 4,
    "encoder": {"width_list": [8, 32], "depth_list": [1, 1], "block_type": ["ResBlock", "EViTS5_GLU"],
                "temporal_downsample": [True, False]},
    "decoder": {"width_list": [8, 32], "depth_list": [1, 1], "block_type": ["ResBlock", "EViTS5_GLU"],
                "temporal_upsample": [True, False]},
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    "type": "hunyuan_vae",
    "latent_channels": 4,
    "block_out_channels": [8, 8, 8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
MODEL: dict[str, Any] = {
    "type": "flux",
    "use_liger_rope": True,
    "fused_qkv": False,
    "in_channels": 16,
    "vec_in_dim": 12,
    "context_in_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "patch_size": 2,
}
CONFIG: dict[str, Any] = {
    "model": MODEL,
    "ae": DC_AE,
    "t5": {"type": "text_embedder", "kind": "hashed_ngrams", "width": 16, "max_length": 8},
    "clip": {"type": "text_embedder", "kind": "hashed_ngrams", "width": 12, "max_length": 8},
    "dropout_ratio": {"t5": 0.4, "clip": 0.4},
    "dataset": {"data_path": "clips.csv", "fps_max": 24},
    "bucket_config": {"32px_ar1:1": {8: [1.0, 2]}},
    "num_workers": 0,
    "optim": {"lr": 1e-3},
    "lr_scheduler": {"warmup_steps": 3},
    "dtype": "fp32",
    "seed": 7,
    "log_every": 1,
    "ckpt_every": 0,
    "ema_decay": 0.9,
}
# What makes the run one on the causal autoencoder, with conditions of every image kind.
CAUSAL: dict[str, Any] = {
    "ae": HUNYUAN,
    "bucket_config": {"64px_ar3:2": {9: [1.0, 2]}},
    "model": {**MODEL, "cond_embed": True},
    "condition_config": {"t2v": 1, "i2v_head": 2, "i2v_loop": 1, "i2v_tail": 1},
}


def write_config(folder: Path, **changes: Any) -> Path:
    """`tiny.yaml` in `folder`: CONFIG with top-level values replaced."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps({**CONFIG, **changes})), sort_keys=False))
    return path


def add_stills(folder: Path, count: int = 4) -> None:
    """Rows of stills at the end of `clips.csv` in `folder`, with their pictures beside it."""
    with (folder / "clips.csv").open("a") as table:
        for i in range(count):
            pixels = np.full((64, 96, 3), (60 * i, 40, 255 - 60 * i), dtype=np.uint8)
            pixels[8 * i : 8 * i + 8] = 255
            Image.fromarray(pixels).save(folder / f"still{i}.png")
            table.write(f"still{i}.png,still {i},1,64,96,{64 / 96},6144,\n")
