"""Several processes that share the clips of a reconstruction, and put what they have done together.

Each leaves its numbers, and its frames of the picture, in a file below the output folder, and waits for the others.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from osora_cli.app.picture import ShownClip
from osora_cli.app.reconstruct.clips import LeftOut
from osora_cli.app.reconstruct.scores import ClipScore
from osora_cli.engine.ranks import Ranks

TIMEOUT_S = 24 * 3600.0  # a rank that is through waits for the one with the longest clips
_FOLDER = ".ranks"


@dataclass
class RankWork:
    """What one rank has done.

    Attributes:
        shown: frames of its clips that are in the picture, by row.
    """

    scores: list[ClipScore] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    shown: dict[int, ShownClip] = field(default_factory=dict)


def share_of(rows: Sequence[int], cost: Callable[[int], float], rank: int, world_size: int) -> list[int]:
    """The rows of one rank, in their order: every `world_size`th by falling cost, from its own number on."""
    by_cost = sorted(range(len(rows)), key=lambda place: (-cost(rows[place]), place))
    mine = set(by_cost[rank::world_size])
    return [row for place, row in enumerate(rows) if place in mine]


def exchange(ranks: Ranks, folder: Path, work: RankWork) -> RankWork:
    """What all ranks have done, the same on each; all of them call it. One process has nobody to exchange with.

    Raises OSError where the folder cannot be written.
    """
    if ranks.world_size == 1:
        return work
    place = folder / _FOLDER
    place.mkdir(exist_ok=True)
    _write(place, ranks.rank, work)
    dist.barrier(group=ranks.host_group)
    parts = [_read(place, rank) for rank in range(ranks.world_size)]
    dist.barrier(group=ranks.host_group)
    if ranks.is_lead:
        shutil.rmtree(place, ignore_errors=True)
    return RankWork(
        sorted((score for part in parts for score in part.scores), key=lambda score: score.row),
        [clip for part in parts for clip in part.left_out],
        {row: clip for part in parts for row, clip in part.shown.items()},
    )


def _write(place: Path, rank: int, work: RankWork) -> None:
    clips = {str(row): {"title": c.title, "numbers": [n for n, _, _ in c.frames]} for row, c in work.shown.items()}
    text = json.dumps(
        {
            "clips": [asdict(score) for score in work.scores],
            "left_out": [asdict(clip) for clip in work.left_out],
            "shown": clips,
        }
    )
    for row, clip in work.shown.items():
        for side in (1, 2):
            np.save(place / _pixels(rank, row, side), np.stack([frame[side] for frame in clip.frames]))
    beside = place / f".{rank}.{os.getpid()}.tmp"
    beside.write_text(text, encoding="utf-8")
    beside.replace(place / f"{rank}.json")


def _read(place: Path, rank: int) -> RankWork:
    found = json.loads((place / f"{rank}.json").read_text(encoding="utf-8"))
    shown = {}
    for row, clip in found["shown"].items():
        sides = (np.load(place / _pixels(rank, int(row), side), allow_pickle=False) for side in (1, 2))
        frames = zip(clip["numbers"], *sides, strict=True)
        shown[int(row)] = ShownClip(clip["title"], [(int(n), one, other) for n, one, other in frames])
    return RankWork([ClipScore(**c) for c in found["clips"]], [LeftOut(**c) for c in found["left_out"]], shown)


def _pixels(rank: int, row: int, side: int) -> str:
    return f"{rank}-{row}-{side}.npy"
