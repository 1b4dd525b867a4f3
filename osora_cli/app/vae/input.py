"""Everything that can be wrong with the input of an autoencoder's training, looked at before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from osora_cli.app.data.input import check_buckets, load_table, make_sampler
from osora_cli.app.sharing import check_parallel_kinds, refuse_sequence_parallel
from osora_cli.app.vae.advice import advice
from osora_cli.config.models.dc_ae import DcAeConfig, check_clip, compression
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.data.check import BucketReport, sampler_report
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.errors import ConfigError
from osora_cli.model.lpips_weights import load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS
from osora_cli.tensors import DTYPES

MakePerceptual = Callable[[torch.device], LPIPS]


@dataclass(frozen=True)
class VaeInput:
    """The checked input: the table, its order over epochs and what that makes of the clips, how LPIPS is made, and what
    the user should be told."""

    table: ClipTable
    sampler: BucketSampler
    report: BucketReport
    make_perceptual: MakePerceptual | None
    notes: list[str] = field(default_factory=list)


def check_vae_input(config: TrainVaeConfig) -> VaeInput:
    """Read the table and make the sampler.

    Raises:
        ConfigError: the config asks for what the model cannot do.
        DataError: the table is missing or unreadable, lacks columns or too many of its files.
        SetupError: a weight that a loss needs is not installed.
    """
    check_parallel_kinds(config)
    refuse_sequence_parallel(config)
    check_buckets(config)
    table = load_table(config.dataset)
    sampler = make_sampler(table, config)
    notes = [*table.notes, *missing_file_notes(table, config.dataset.max_bad_fraction)]
    report = sampler_report(sampler)
    notes += [*report.lines(), *advice(config, sampler.table.buckets)]
    return VaeInput(table, sampler, report, _perceptual(config), notes)


def missing_file_notes(table: ClipTable, max_bad_fraction: float) -> list[str]:
    """What to say of rows whose file is not there. More than the run may lose end it here, not in the middle."""
    missing = table.missing_files()
    if not missing:
        return []
    error = table.missing_files_error(missing)
    if len(missing) > max_bad_fraction * len(table):
        raise error
    return [str(error)]


def clip_lengths(model: DcAeConfig, most: int) -> list[int]:
    """The clip lengths from 1 to `most` that the network takes, ascending."""
    _, spatial = compression(model)
    lengths = []
    for frames in range(1, most + 1):
        try:
            check_clip(model, frames, spatial, spatial)
        except ConfigError:
            continue
        lengths.append(frames)
    return lengths


def _perceptual(config: TrainVaeConfig) -> MakePerceptual | None:
    """How LPIPS is made, once its weights are known to be there; None where the loss does not want it."""
    if config.vae_loss_config.perceptual_loss_weight == 0:
        return None
    weights = locate_lpips()
    return lambda device: load_lpips(weights, device=device, compute_dtype=DTYPES[config.dtype])
