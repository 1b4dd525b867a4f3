"""Everything that can be wrong with the input of a diffusion training, looked at before anything is built."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from osora_cli.app.data.input import check_buckets, load_table, make_sampler
from osora_cli.app.frozen_parts import resolve_autoencoder
from osora_cli.app.sharing import check_parallel_kinds
from osora_cli.app.vae.input import missing_file_notes
from osora_cli.config.diffusion import TrainDiffusionConfig, check_parts
from osora_cli.data.check import BucketReport, sampler_report
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.engine.sequence import check_heads
from osora_cli.errors import ConfigError


@dataclass(frozen=True)
class DiffusionInput:
    """The checked input.

    Attributes:
        config: with the autoencoder's architecture known.
        report: what the order makes of the clips.
        notes: what the user should be told.
    """

    config: TrainDiffusionConfig
    table: ClipTable
    sampler: BucketSampler
    report: BucketReport
    notes: list[str] = field(default_factory=list)


def check_diffusion_input(config: TrainDiffusionConfig) -> DiffusionInput:
    """Read the table and make the sampler.

    Raises:
        ConfigError: the config asks for what model, autoencoder or this number of processes cannot do.
        CheckpointError: the autoencoder's checkpoint is missing or damaged.
        DataError: the table is missing or unreadable, lacks columns or too many of its files.
    """
    check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")))
    resolved = resolve_autoencoder(config)
    config = resolved.config
    check_parts(config)
    check_buckets(config)
    table = load_table(config.dataset)
    sampler = make_sampler(table, config)
    notes = [*resolved.notes, *table.notes]
    if not config.cached_video:  # a cache serves without its clips
        notes += missing_file_notes(table, config.dataset.max_bad_fraction)
    if config.dataset.vmaf:
        notes += _motion_notes(table)
    report = sampler_report(sampler)
    return DiffusionInput(config, table, sampler, report, [*notes, *report.lines()])


def check_ranks(config: TrainDiffusionConfig, world_size: int) -> None:
    """Whether so many processes can share the work as `plugin: hybrid` says.

    Raises:
        ConfigError: they cannot, or it asks for what there is not.
    """
    check_parallel_kinds(config)
    if config.plugin != "hybrid":
        return
    settings = config.plugin_config
    if world_size % settings.sp_size:
        count = "one process" if world_size == 1 else f"{world_size} processes"
        raise ConfigError(
            f"`plugin_config.sp_size` is `{settings.sp_size}`, and {count} cannot share the tokens of a sample so",
            where="plugin_config.sp_size",
            allowed=f"divisors of {world_size}",
            hint=f"start it with `torchrun --nproc-per-node {settings.sp_size} -m osora_cli train diffusion ...`, or "
            "`--plugin zero2`",
        )
    check_heads(config.model.num_heads, settings.sp_size)


def _motion_notes(table: ClipTable) -> list[str]:
    scores = table.score_vmafmotion
    if scores is None:
        return ["dataset.vmaf: the table has no column score_vmafmotion, captions say nothing of motion"]
    lacking = int(np.isnan(scores).sum())
    return [f"dataset.vmaf: {lacking} of {len(table)} clips have no motion score"] if lacking else []
