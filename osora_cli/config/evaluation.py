"""The section `eval`: the fixed clips that networks are scored on while they train."""

from __future__ import annotations

from pydantic import Field

from osora_cli.config.base import Int, Section


class EvalConfig(Section):
    """Which clips, frames and scores. Clips and frames are drawn once, from `window_seed` alone."""

    table: str | None = Field(None, description="table of held-out clips; null: the training's own table")
    table_root: str | None = Field(None, description="folder that relative clip paths of that table are tried in last")
    rows: list[Int] | None = Field(None, description="rows of the table, from 0; null: drawn from all that fit")
    number: Int = Field(8, ge=1, description="clips; a table with fewer rows gives several windows of each")
    resolution: str | None = Field(None, description="size, as in bucket_config; null: its largest")
    frames: Int | None = Field(None, ge=1, description="frames of a window; null: the longest of bucket_config")
    batch_size: Int = Field(2, ge=1, description="clips scored at a time; at least two on a CPU")
    window_seed: Int = Field(42, ge=0, description="draws the clips and their windows; not the run's seed")
    lpips: bool | None = Field(
        None, description="score with LPIPS; null: where its weights are (`osora weights fetch lpips-vgg`)"
    )
    raw_weights: bool = Field(True, description="score the weights themselves beside their average")
    pictures: Int = Field(2, ge=0, description="clips shown in TensorBoard and RUN/eval/")
    at_ends: bool = Field(True, description="score before the first update and after the last as well")
