"""The fixed clips that a training is scored on, drawn from its own table or a held-out one."""

from __future__ import annotations

from dataclasses import dataclass

from osora_cli.config.schema import TrainConfig
from osora_cli.data.aspect import resolve_resolution
from osora_cli.data.fixed_clips import FixedClip, plan_fixed_clips
from osora_cli.data.table import ClipTable


@dataclass(frozen=True)
class EvalClips:
    """Clips that are not read yet.

    Attributes:
        table: what they are rows of.
        held_out: whether that is another table than the training's.
        frames: of each.
    """

    clips: list[FixedClip]
    table: ClipTable
    held_out: bool
    frames: int

    @property
    def notes(self) -> list[str]:
        """What reading a held-out table had to say."""
        return list(self.table.notes) if self.held_out else []


def eval_frames(config: TrainConfig) -> int:
    """Frames of each clip: as the config says, else of the longest bucket."""
    return config.eval.frames or max(f for lengths in config.bucket_config.values() for f in lengths)


def draw_eval_clips(config: TrainConfig, training_table: ClipTable, spatial_step: int) -> EvalClips:
    """Clips of the size that `eval` names, else of the largest resolution of the buckets.

    Args:
        spatial_step: what height and width are multiples of, pixels.

    Raises:
        ConfigError: sizes or rows that cannot be.
        DataError: no clip fits, or the held-out table cannot be used.
    """
    wanted, buckets = config.eval, config.bucket_config
    table = training_table if wanted.table is None else ClipTable.load(wanted.table, wanted.table_root)
    frames = eval_frames(config)
    clips = plan_fixed_clips(
        table,
        resolution=wanted.resolution or max(buckets, key=lambda name: resolve_resolution(name, spatial_step).pixels),
        frames=frames,
        number=len(wanted.rows) if wanted.rows else wanted.number,
        rows=wanted.rows,
        seed=wanted.window_seed,
        spatial_compression=spatial_step,
        fps_max=config.dataset.fps_max,
    )
    return EvalClips(clips, table, wanted.table is not None, frames)
