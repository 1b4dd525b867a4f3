"""Reconstruct clips with a trained autoencoder, and say in numbers how well."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osora_cli.app.picture import side_by_side
from osora_cli.app.reconstruct.clips import LeftOut, Selection, none_usable, open_rows, select
from osora_cli.app.reconstruct.files import METRICS_NAME, PICTURE_NAME, make_folders, remove_earlier
from osora_cli.app.reconstruct.find import Found, find_autoencoder
from osora_cli.app.reconstruct.lpips import LpipsMetric, find_lpips
from osora_cli.app.reconstruct.net import Net, load_net
from osora_cli.app.reconstruct.output import ORIG, PAIR, RECN, Files
from osora_cli.app.reconstruct.pieces import SHOWN_CLIPS, ProgressCall, Runner
from osora_cli.app.reconstruct.protocol import protocol
from osora_cli.app.reconstruct.ranks import TIMEOUT_S, RankWork, exchange, share_of
from osora_cli.app.reconstruct.scores import ClipScore
from osora_cli.config.models.autoencoder import compression
from osora_cli.config.schema import ReconstructConfig
from osora_cli.engine.launch import joined, watched
from osora_cli.engine.ranks import Ranks
from osora_cli.errors import RunError
from osora_cli.report.jsonl import plain, write_json
from osora_cli.tensors import DTYPES

SCHEMA_VERSION = 1
_MEANS = (
    "psnr",
    "ssim",
    "lpips",
    "flicker",
    "checkerboard_space",
    "checkerboard_space_ratio",
    "checkerboard_time",
    "checkerboard_time_ratio",
    "constant_colour_psnr",
    "block_mean_psnr",
)


@dataclass(frozen=True)
class ReconstructResult:
    """What came of a reconstruction.

    Attributes:
        save_dir: the folder with orig/, recn/, side_by_side/, the picture and metrics.json.
        clips: the scores, in the order of the input's rows.
        left_out: clips that were not reconstructed, with reasons.
        mean: mean over the clips of each number, over those that have it; None where none has.
        protocol: how the numbers were made.
        picture: the side-by-side picture.
        weights: which these are, in words.
        seconds: the whole call.
        notes: what the user should be told.
    """

    save_dir: Path
    clips: list[ClipScore]
    left_out: list[LeftOut]
    mean: dict[str, float | None]
    protocol: dict[str, Any]
    picture: Path
    weights: str
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
                "weights": self.weights,
                "metrics": self.metrics,
                "seconds": round(self.seconds, 3),
                "notes": self.notes,
            }
        )
        assert isinstance(result, dict)
        return result


def reconstruct(
    config: ReconstructConfig,
    *,
    progress: ProgressCall | None = None,
    notify: Callable[[str], None] | None = None,
) -> ReconstructResult:
    """Run clips through the autoencoder that `model.from_pretrained` names; write videos, a picture and numbers.

    Clips of any length and size: long ones go through in temporal tiles, or, where those are off, in pieces of the
    trained length; clips that do not fill the net's stride are padded by repetition and cut back. As many frames come
    out as went in, at their size and rate. Everything that can be wrong with the input is found before the net is built
    and before a file is written. Files of other makers in the output folder are left alone; its own are replaced one
    by one, each in one rename, and those of an earlier run that are not made again are removed at the end.

    Where a launcher has started several processes, they share the clips; each returns the whole result.

    Args:
        progress: called as clips go through (on the first rank).
        notify: called once, before the work, with which weights are taken.

    Raises:
        UsageError: the config is wrong, or an output would overwrite an input.
        DataError: the table cannot be used, or no clip.
        CheckpointError: the weights are missing, damaged, or of another model.
        RunError: no reconstruction has finite values.
        SetupError: the output folder cannot be written, or LPIPS is asked for and its weights cannot be had.
        Followed: another rank failed and says why.
    """
    with joined("auto", TIMEOUT_S) as ranks, watched(ranks, TIMEOUT_S):
        return _Reconstruction(config, ranks).run(progress, notify)


class _Reconstruction:
    """One rank's view of a reconstruction."""

    def __init__(self, config: ReconstructConfig, ranks: Ranks) -> None:
        self._started = time.perf_counter()
        self._config, self._ranks = config, ranks
        self._found: Found = find_autoencoder(config.model)
        self._lpips: LpipsMetric | None = find_lpips(config.lpips, self._found.notes)
        self._selection: Selection = select(open_rows(config), config, compression(self._found.config)[1])
        sides = (ORIG, RECN, PAIR) if config.side_by_side else (ORIG, RECN)
        self._files = Files(Path(config.save_dir).expanduser(), sides, config.lossless)

    def run(self, progress: ProgressCall | None, notify: Callable[[str], None] | None) -> ReconstructResult:
        selection, ranks = self._selection, self._ranks
        mine = share_of(selection.rows, selection.cost, ranks.rank, ranks.world_size)
        known = [] if ranks.rank else list(selection.left_out)  # each rank knows of them, one tells
        part = replace(selection, rows=mine, left_out=known)
        plans = part.plans()
        first = next(plans, None)
        if first is None and ranks.world_size == 1:
            raise none_usable(part.left_out, selection.source.source)
        make_folders(self._files)
        net = self._net()
        if notify is not None and ranks.is_lead:
            notify(f"weights: {net.described()}")
        runner = Runner(
            net=net,
            files=self._files,
            chunk=self._found.chunk,
            batch_size=self._config.batch_size,
            total=len(mine),
            left_out=part.left_out,
            progress=progress if ranks.is_lead else None,
            lpips=self._lpips.net.to(net.device) if self._lpips else None,
        )
        runner.run(chain([first] if first else [], plans))
        work = exchange(ranks, self._files.folder, RankWork(runner.scores, part.left_out, runner.shown))
        if not work.scores:
            raise none_usable(work.left_out, selection.source.source)
        return self._result(net, work)

    def _net(self) -> Net:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", self._ranks.local_rank if self._ranks.world_size > 1 else 0)
        return load_net(self._found, use_ema=self._config.use_ema, device=device, dtype=DTYPES[self._config.dtype])

    def _result(self, net: Net, work: RankWork) -> ReconstructResult:
        """The result of all ranks; the first puts it into the folder."""
        folder, notes = self._files.folder, list(self._found.notes)
        scores = sorted(work.scores, key=lambda score: score.row)
        notes += told_not_finite(scores, net.described())
        if self._ranks.is_lead:
            side_by_side([work.shown[row] for row in sorted(work.shown)[:SHOWN_CLIPS]], folder / PICTURE_NAME)
            removed = remove_earlier(folder, _files_of(scores))
            if removed:
                notes.append(f"removed {len(removed)} files of an earlier run in `{folder}`: {_listed(removed)}")
        result = ReconstructResult(
            save_dir=folder,
            clips=scores,
            left_out=sorted(work.left_out, key=lambda clip: clip.row),
            mean=mean_scores(scores),
            protocol={
                **protocol(self._config, self._found, net, self._lpips, self._selection, scores, len(work.left_out)),
                "ranks": self._ranks.world_size,
            },
            picture=folder / PICTURE_NAME,
            weights=net.described(),
            seconds=time.perf_counter() - self._started,
            notes=notes,
        )
        if self._ranks.is_lead:
            write_json(result.metrics, result.to_json())
        return result


def told_not_finite(scores: Sequence[ClipScore], weights: str) -> list[str]:
    """A note on clips that came back with values that are not finite: no mean counts them. RunError where all did."""
    bad = [score.name for score in scores if math.isnan(score.psnr)]
    if not bad:
        return []
    told = f"the reconstructions of {len(bad)} of {len(scores)} clips hold values that are not finite"
    if len(bad) == len(scores):
        raise RunError(
            told, where=weights, hint="the weights are spoilt: take an earlier checkpoint, or `--dtype fp32`"
        )
    return [f"{told}, and stand in no mean: {_listed(bad)}"]


def _files_of(scores: Sequence[ClipScore]) -> list[str]:
    return [name for score in scores for name in (score.orig, score.recn, score.side_by_side) if name]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def mean_scores(scores: Sequence[ClipScore]) -> dict[str, float | None]:
    """Mean over the clips that have a finite number, each clip with equal weight; None where none has."""
    means: dict[str, float | None] = {}
    for name in _MEANS:
        found = (value for score in scores if (value := getattr(score, name)) is not None)
        # A black clip is its own best constant colour: that infinity would hide what the others say.
        values = [value for value in found if math.isfinite(value)]
        means[name] = float(np.mean(values)) if values else None
    return means
