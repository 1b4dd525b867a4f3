"""How the numbers of a reconstruction came about, so that others can be compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from osora_cli import __version__
from osora_cli.app.reconstruct.clips import Selection
from osora_cli.app.reconstruct.find import Found
from osora_cli.app.reconstruct.lpips import LpipsMetric
from osora_cli.app.reconstruct.net import Net
from osora_cli.app.reconstruct.scores import DATA_RANGE, ClipScore
from osora_cli.config.models.autoencoder import tile_names
from osora_cli.config.schema import ReconstructConfig

_MEANINGS = {
    "compared": "the net's output clamped to [0, 1], before rounding and encoding, with the frames it was given",
    "psnr": "dB, of the squared error averaged over all frames, channels and pixels of a clip",
    "ssim": "Gaussian window 11x11, sigma 1.5, K1 0.01, K2 0.03, reflected edges; mean over channels and frames",
    "flicker": "mean absolute error of the differences between neighbouring frames",
    "checkerboard": "share of the error's spectral energy, mean left out, at the up-sampling period and its harmonics, "
    "along rows and columns (space) and along time; ratio: against the mean of the two frequencies beside each",
    "constant_colour_psnr": "dB, of the best constant colour of a clip",
    "block_mean_psnr": "dB, of means over boxes drawn without interpolation, as many numbers as the latent has",
    "mean": "mean over clips",
}


def protocol(
    config: ReconstructConfig,
    found: Found,
    net: Net,
    lpips: LpipsMetric | None,
    selection: Selection,
    scores: Sequence[ClipScore],
    clips_left_out: int,
) -> dict[str, Any]:
    """Data, weights, net, precision, and what each number means."""
    time, space = net.ratios
    return {
        **_data(config, selection, scores, clips_left_out),
        **_coding(found, net),
        "compression": {"time": time, "space": space},
        "dtype": config.dtype,
        "weights_dtype": str(net.weights_dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(net.device) if net.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "osora": __version__,
        "data_range": DATA_RANGE,
        "videos": "lossless RGB" if config.lossless else "H.264, CRF 12",
        "checkerboard_periods": {"frames": time, "pixels": space},
        "lpips": _lpips(lpips) if lpips else None,
        **_MEANINGS,
    }


def _data(
    config: ReconstructConfig, selection: Selection, scores: Sequence[ClipScore], clips_left_out: int
) -> dict[str, Any]:
    source = selection.source
    window = {
        "bucket_config": config.bucket_config,
        "fps_max": config.dataset.fps_max,
        "rand_sample_interval": config.dataset.rand_sample_interval,
        "seed": config.seed,
    }
    return {
        "data": {"source": source.source, "kind": source.kind, "digest": source.digest},
        "clips": len(scores),
        "clips_left_out": clips_left_out,
        "frames": sum(score.frames for score in scores),
        "sizes": sorted({f"{score.width}x{score.height}" for score in scores}),
        "fps": sorted({score.fps for score in scores if score.fps is not None}),
        "extent": "window" if config.bucket_config else "whole",
        "window": window if config.bucket_config else None,
    }


def _coding(found: Found, net: Net) -> dict[str, Any]:
    model = found.config
    names = ("use_spatial_tiling", "use_temporal_tiling", *tile_names(model), "tile_overlap_factor")
    tiled = model.use_spatial_tiling or model.use_temporal_tiling
    return {
        "model": model.type,
        "latent": "mean of the posterior" if net.is_causal else "the encoder's output",
        "frames_per_piece": "whole clip" if model.use_temporal_tiling else found.chunk,
        "tiling": {name: getattr(model, name) for name in names} if tiled else None,
        "weights": {"path": found.weights, "step": net.step, "ema": net.ema},
    }


def _lpips(lpips: LpipsMetric) -> dict[str, Any]:
    return {
        "net": "VGG16",
        "weights": "LPIPS 0.1",
        "path": lpips.path,
        "sha256": lpips.sha256,
        "input_range": [-1, 1],
        "dtype": "fp32",
        "mean": "mean over frames",
    }
