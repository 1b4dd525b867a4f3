"""What a config says of its data, made into a table and the order of its clips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from osora_cli.config.base import Section
from osora_cli.config.models import dc_ae, hunyuan_vae
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.config.schema import TrainConfig
from osora_cli.config.sections import DatasetConfig
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import SCORE_COLUMN, ClipTable
from osora_cli.errors import ConfigError

# Open-Sora's, where nothing else is said.
_DEFAULT_STEP = 16


def load_table(dataset: DatasetConfig) -> ClipTable:
    """The table of a config.

    Raises:
        ConfigError: it names none.
        DataError: the table is missing or unreadable, lacks columns or holds values that cannot be.
    """
    if dataset.data_path is None:
        raise ConfigError(
            "no table of clips is given",
            where="dataset.data_path",
            hint="--dataset.data-path TABLE.csv, as `osora data meta --input FOLDER --output TABLE.csv` writes it",
        )
    table = ClipTable.load(dataset.data_path, dataset.root, memory_efficient=dataset.memory_efficient)
    return replace(table, notes=(*table.notes, *_about_scores(table))) if dataset.vmaf else table


def _about_scores(table: ClipTable) -> list[str]:
    """What to say when captions are to hold motion scores that are not there."""
    scores = table.score_vmafmotion
    missing = len(table) if scores is None else int(np.isnan(scores).sum())
    if not missing:
        return []
    where = "the table has no" if scores is None else f"{missing} of {len(table)} rows have nothing in"
    return [f"`dataset.vmaf` is on and {where} column `{SCORE_COLUMN}`: those captions get no motion score"]


def make_sampler(table: ClipTable, config: TrainConfig, *, num_replicas: int = 1, rank: int = 0) -> BucketSampler:
    """The order of a table's clips in a training.

    Raises:
        ConfigError: `bucket_config` is wrong.
    """
    return BucketSampler(
        table.num_frames,
        table.height,
        table.width,
        table.fps,
        bucket_config=config.bucket_config,
        spatial_compression=spatial_step(config),
        fps_max=config.dataset.fps_max,
        num_replicas=num_replicas,
        rank=rank,
        seed=config.seed,
        balance_window=config.dataset.balance_window,
        table_digest=table.digest,
    )


def spatial_step(config: TrainConfig) -> int:
    """Pixels that height and width of every bucket are multiples of: `ae_spatial_compression` where the config says
    it, else what the autoencoder and the patches of the model make of a pixel."""
    stated = getattr(config, "ae_spatial_compression", None)
    if stated is not None:
        return int(stated)
    autoencoder = _autoencoder(config)
    if autoencoder is None:
        return _DEFAULT_STEP
    patch = 1 if autoencoder is getattr(config, "model", None) else getattr(config.model, "patch_size", 1)  # type: ignore[attr-defined]
    return _compression(autoencoder)[1] * int(patch)


def check_buckets(config: TrainConfig) -> None:
    """Whether the autoencoder takes clips of every length in `bucket_config`.

    Raises:
        ConfigError: it does not, with the lengths that it does take.
    """
    autoencoder = _autoencoder(config)
    if autoencoder is None:
        return
    side = _compression(autoencoder)[1]
    for lengths in config.bucket_config.values():
        for frames in lengths:
            if isinstance(autoencoder, DcAeConfig):
                dc_ae.check_clip(autoencoder, frames, side, side)
            else:
                hunyuan_vae.check_clip(autoencoder, frames, side, side)


def _autoencoder(config: TrainConfig) -> DcAeConfig | HunyuanVaeConfig | None:
    """The section of the autoencoder: `ae` where a config has one, else `model`."""
    found: Section | None = getattr(config, "ae", None) or getattr(config, "model", None)
    return found if isinstance(found, DcAeConfig | HunyuanVaeConfig) else None


def _compression(section: DcAeConfig | HunyuanVaeConfig) -> tuple[int, int]:
    return dc_ae.compression(section) if isinstance(section, DcAeConfig) else hunyuan_vae.compression(section)
