"""A trained run, clips and configs for tests of `osora infer reconstruct`."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import torch
from support.tiny import CONFIG

from osora_cli.app.reconstruct.run import ReconstructResult
from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.config.freeze import write_config
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig
from osora_cli.data.media import probe
from osora_cli.errors import DataError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.tensors import TensorShard

TRAINING = TrainVaeConfig.model_validate({**CONFIG, "bucket_config": {"32px_ar1:1": {8: [1.0, 2]}}})
WINDOW = {"32px_ar1:1": {8: [1.0, 1]}}


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights that let some of the picture through: every tensor of unit gain, in place of near zero."""
    model = DcAe(TRAINING.model)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        fan_in = max(1, value[0].numel()) if value.dim() > 1 else 1
        scale = 0.5 / math.sqrt(fan_in) if value.dim() > 1 else 0.1
        state[key] = torch.randn(value.shape, generator=generator) * scale
    return state


def make_run(folder: Path, steps: tuple[int, ...] = (5,), ema: bool = True) -> Path:
    """A run with its config and checkpoints of these updates, as a training leaves it."""
    folder.mkdir(parents=True)
    write_config(TRAINING, folder)
    store = CheckpointStore(folder, async_io=False)
    for step in steps:
        sharded = {"model": [TensorShard.whole(key, value) for key, value in weights(step).items()]}
        if ema:
            sharded["ema"] = [TensorShard.whole(key, value) for key, value in weights(100 + step).items()]
        store.save(CheckpointContents(Counters(0, step, step, 1, step), sharded))
    store.finish()
    store.close()
    return folder


def write_table(path: Path, files: list[Path]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps"])
        for clip in files:
            try:
                info = probe(clip)
                facts = [info.num_frames, info.height, info.width, info.fps if math.isfinite(info.fps) else ""]
            except DataError:
                facts = [20, 64, 96, 24.0]
            frames, height, width, fps = facts
            writer.writerow([clip, "a clip", frames, height, width, height / width, height * width, fps])
    return path


def config(data: Path, weights_from: Path | None, save_dir: Path, **more: Any) -> ReconstructConfig:
    model = more.pop("model", {})
    if weights_from is not None:
        model = {"from_pretrained": str(weights_from), **model}
    given = {"dataset": {"data_path": str(data)}, "model": model, "save_dir": str(save_dir)}
    # Without LPIPS unless a test asks: whether its weights are on the machine must not matter.
    return ReconstructConfig.model_validate({**given, "dtype": "fp32", "lpips": False, **more})


def scores(result: ReconstructResult) -> list[float]:
    return [clip.psnr for clip in result.clips]
