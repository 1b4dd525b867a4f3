"""Reconstruct clips with a trained autoencoder, and say in numbers how well."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osora_cli import __version__
from osora_cli.app.picture import side_by_side
from osora_cli.app.recon_input import LeftOut, Selection, none_usable, open_rows, select
from osora_cli.app.recon_model import Found, Loaded, LpipsMetric, find_autoencoder, find_lpips, load_autoencoder
from osora_cli.app.recon_output import DATA_RANGE, ClipScore
from osora_cli.app.recon_run import ProgressCall, Runner
from osora_cli.config.models.dc_ae import compression
from osora_cli.config.schema import ReconstructConfig
from osora_cli.errors import SetupError
from osora_cli.report.jsonl import plain, write_json
from osora_cli.tensors import DTYPES

SCHEMA_VERSION = 1
METRICS_NAME = "metrics.json"
PICTURE_NAME = "side_by_side.png"
_MEANS = ("psnr", "ssim", "lpips", "flicker", "constant_colour_psnr", "block_mean_psnr")


@dataclass(frozen=True)
class ReconstructResult:
    """What came of a reconstruction.

    Attributes:
        save_dir: the folder with orig/, recn/, the picture and metrics.json.
        clips: the scores, in the order of the input's rows.
        left_out: clips that were not reconstructed, with reasons.
        mean: mean over the clips of each number, over those that have it; None where none has.
        protocol: how the numbers were made.
        picture: the side-by-side picture.
        seconds: the whole call.
        notes: what the user should be told.
    """

    save_dir: Path
    clips: list[ClipScore]
    left_out: list[LeftOut]
    mean: dict[str, float | None]
    protocol: dict[str, Any]
    picture: Path
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        return self.save_dir / METRICS_NAME

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite as strings."""
        result = plain(
            {
                "schema_version": SCHEMA_VERSION,
                "save_dir": self.save_dir,
                "mean": self.mean,
                "clips": [clip.to_json() for clip in self.clips],
                "left_out": [{"row": c.row, "path": c.path, "reason": c.reason} for c in self.left_out],
                "protocol": self.protocol,
                "picture": self.picture,
                "metrics": self.metrics,
                "seconds": round(self.seconds, 3),
                "notes": self.notes,
            }
        )
        assert isinstance(result, dict)
        return result


def reconstruct(config: ReconstructConfig, *, progress: ProgressCall | None = None) -> ReconstructResult:
    """Run clips through the autoencoder that `model.from_pretrained` names; write videos, a picture and numbers.

    Long clips are coded in pieces of the trained length, and clips that do not fill the net's stride are padded by
    repetition and cut back: as many frames come out as went in, at their size and rate. Everything that can be wrong
    with the input is found before the net is built and before a file is written. Files of other makers in the output
    folder are left alone; its own are replaced one by one, each in one rename.

    Raises:
        UsageError: the config is wrong, or an output would overwrite an input.
        DataError: the table cannot be used, or no clip.
        CheckpointError: the weights are missing, damaged, or of another model.
        SetupError: the output folder cannot be written, or LPIPS is asked for and its weights cannot be had.
    """
    started = time.perf_counter()
    found = find_autoencoder(config.model)
    lpips = find_lpips(config.lpips, found.notes)
    rows = open_rows(config)
    selection = select(rows, config, compression(found.config)[1])
    plans = selection.plans()
    first = next(plans, None)
    if first is None:
        raise none_usable(selection.left_out, rows.source)
    folder = Path(config.save_dir).expanduser()
    _make_folders(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = load_autoencoder(found, use_ema=config.use_ema, device=device, dtype=DTYPES[config.dtype])
    runner = Runner(
        model=net.model,
        folder=folder,
        device=device,
        chunk=None if found.config.use_temporal_tiling else found.chunk,
        batch_size=config.batch_size,
        total=len(selection.rows),
        left_out=selection.left_out,
        progress=progress,
        lpips=lpips.net.to(device) if lpips else None,
    )
    runner.run(chain([first], plans))
    if not runner.scores:
        raise none_usable(selection.left_out, rows.source)
    scores = sorted(runner.scores, key=lambda score: score.row)
    side_by_side(runner.shown, folder / PICTURE_NAME)
    result = ReconstructResult(
        save_dir=folder,
        clips=scores,
        left_out=sorted(selection.left_out, key=lambda clip: clip.row),
        mean=mean_scores(scores),
        protocol=_protocol(config, found, net, lpips, selection, scores, device),
        picture=folder / PICTURE_NAME,
        seconds=time.perf_counter() - started,
        notes=found.notes,
    )
    write_json(result.metrics, result.to_json())
    return result


def mean_scores(scores: Sequence[ClipScore]) -> dict[str, float | None]:
    """Mean over the clips that have a finite number, each clip with equal weight; None where none has."""
    means: dict[str, float | None] = {}
    for name in _MEANS:
        found = (value for score in scores if (value := getattr(score, name)) is not None)
        # A black clip is its own best constant colour: that infinity would hide what the others say.
        values = [value for value in found if math.isfinite(value)]
        means[name] = float(np.mean(values)) if values else None
    return means


def _make_folders(folder: Path) -> None:
    try:
        for side in ("orig", "recn"):
            (folder / side).mkdir(parents=True, exist_ok=True)
            probe = folder / side / ".write-test"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise SetupError(
            f"cannot write to `{folder}`: {error.strerror}",
            where="save_dir",
            hint="choose another folder with `--save-dir DIR`, or give this one write permission",
        ) from error


def _protocol(
    config: ReconstructConfig,
    found: Found,
    net: Loaded,
    lpips: LpipsMetric | None,
    selection: Selection,
    scores: Sequence[ClipScore],
    device: torch.device,
) -> dict[str, Any]:
    """How the numbers came about, so that others can be compared with them."""
    time_compression, spatial_compression = compression(found.config)
    window = {
        "bucket_config": config.bucket_config,
        "fps_max": config.dataset.fps_max,
        "rand_sample_interval": config.dataset.rand_sample_interval,
        "seed": config.seed,
    }
    tiling = {
        name: getattr(found.config, name)
        for name in (
            "use_spatial_tiling",
            "use_temporal_tiling",
            "spatial_tile_size",
            "temporal_tile_size",
            "tile_overlap_factor",
        )
    }
    return {
        "data": {"source": selection.source.source, "kind": selection.source.kind, "digest": selection.source.digest},
        "clips": len(scores),
        "clips_left_out": len(selection.left_out),
        "frames": sum(score.frames for score in scores),
        "sizes": sorted({f"{score.width}x{score.height}" for score in scores}),
        "fps": sorted({score.fps for score in scores if score.fps is not None}),
        "extent": "window" if config.bucket_config else "whole",
        "window": window if config.bucket_config else None,
        "frames_per_piece": "whole clip" if found.config.use_temporal_tiling else found.chunk,
        "tiling": tiling if found.config.use_spatial_tiling or found.config.use_temporal_tiling else None,
        "weights": {"path": found.weights, "step": net.step, "ema": net.ema},
        "compression": {"time": time_compression, "space": spatial_compression},
        "dtype": config.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "osora": __version__,
        "data_range": DATA_RANGE,
        "compared": "the net's output clamped to [0, 1], before rounding and encoding, with the frames it was given",
        "psnr": "dB, of the squared error averaged over all frames, channels and pixels of a clip",
        "ssim": "Gaussian window 11x11, sigma 1.5, K1 0.01, K2 0.03, reflected edges; mean over channels and frames",
        "lpips": _lpips_protocol(lpips) if lpips else None,
        "flicker": "mean absolute error of the differences between neighbouring frames",
        "constant_colour_psnr": "dB, of the best constant colour of a clip",
        "block_mean_psnr": "dB, of means over boxes drawn without interpolation, as many numbers as the latent has",
        "mean": "mean over clips",
    }


def _lpips_protocol(lpips: LpipsMetric) -> dict[str, Any]:
    return {
        "net": "VGG16",
        "weights": "LPIPS 0.1",
        "path": lpips.path,
        "sha256": lpips.sha256,
        "input_range": [-1, 1],
        "dtype": "fp32",
        "mean": "mean over frames",
    }
