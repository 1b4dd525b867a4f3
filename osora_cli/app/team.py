"""What the ranks of a training share before and around the loop: one plan, one folder, one voice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from osora_cli.app.runs import RunInfo, RunPlan, open_folder
from osora_cli.app.training import STARTING
from osora_cli.checkpoint.comm import SINGLE, Comm, agree, together
from osora_cli.checkpoint.comm_dist import DistComm
from osora_cli.config.schema import TrainConfig
from osora_cli.data.sampler import BucketSampler
from osora_cli.engine.launch import joined, record_flights_in, save_group, watched
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.watch import Watch
from osora_cli.errors import DataError, RunError

RANKS_FOLDER = "ranks"


@dataclass(frozen=True)
class Team:
    """This process among those of the run.

    Attributes:
        ranks: all processes.
        comm: for small things before and after the loop.
        save_comm: for checkpoints.
        watch: None for one process.
    """

    ranks: Ranks
    comm: Comm
    save_comm: Comm
    watch: Watch | None

    def progress(self, update: int | None) -> None:
        if self.watch is not None:
            self.watch.progress(update)


@contextmanager
def team(config: TrainConfig) -> Iterator[Team]:
    """The processes that a launcher has started for this training; alone without one.

    Raises:
        SetupError: they do not find each other.
    """
    sequence = config.plugin_config.sp_size if config.plugin == "hybrid" else 1
    with joined(config.device, config.collective_timeout_s) as ranks:
        ranks = replace(ranks, sequence=sequence)
        with watched(ranks, config.collective_timeout_s) as watch:
            if ranks.world_size == 1:
                yield Team(ranks, SINGLE, SINGLE, None)
            else:
                yield Team(ranks, DistComm(ranks.host_group), DistComm(save_group(ranks)), watch)


def shared_plan(team: Team, make: Callable[[], RunPlan]) -> RunPlan:
    """Rank 0 decides on folder and start, for all: names with times in them, and one reading of the digests."""
    if team.ranks.world_size == 1:
        return make()

    def plain() -> dict[str, Any] | None:
        if not team.ranks.is_lead:
            return None
        made = make()
        start = None if made.start is None else str(made.start)
        return {
            "folder": str(made.folder),
            "info": asdict(made.info),
            "start": start,
            "in_place": made.in_place,
            "notes": made.notes,
        }

    told = together(team.comm, plain)[0]
    assert told is not None
    return RunPlan(
        Path(told["folder"]),
        RunInfo(**told["info"]),
        None if told["start"] is None else Path(told["start"]),
        told["in_place"],
        list(told["notes"]),
    )


def agree_on_start(team: Team, notes: Sequence[str]) -> None:
    """See that all ranks found the same pretrained weights: a run that is still trained may have saved meanwhile.

    Args:
        notes: of the training; those that begin with `STARTING` name the weights.

    Raises:
        RunError: they found different ones.
    """
    try:
        agree(team.comm, "the weights to start from", [note for note in notes if note.startswith(STARTING)])
    except ValueError as error:
        raise RunError(
            str(error), hint="name one checkpoint of that run, not the run: `--from-pretrained CKPT`"
        ) from error


def share_data(sampler: BucketSampler, ranks: Ranks) -> None:
    """Have the sampler deal the batches out. Ranks that share a sample's tokens get the same.

    Raises:
        DataError: fewer batches than ranks.
    """
    replicas = ranks.data_replicas
    if replicas == 1:
        return
    batches = len(sampler.epoch_batches(0))
    sampler.num_replicas, sampler.rank = replicas, ranks.data_rank
    if not len(sampler.epoch_batches(0)):
        raise DataError(
            f"the first epoch has {batches} batches, too few for `{replicas}` ranks that each take one at a time",
            hint="start fewer processes, make batches smaller in bucket_config, or give more clips",
        )


@contextmanager
def run_folder(team: Team, plan: RunPlan) -> Iterator[None]:
    """The run's folder, made and held by rank 0. What the other ranks say goes to `RUN/ranks/rankN.log` meanwhile."""
    with ExitStack() as stack:
        folder = plan.folder / RANKS_FOLDER
        if team.ranks.is_lead:
            stack.enter_context(open_folder(plan))
            if team.ranks.world_size > 1:
                folder.mkdir(exist_ok=True)
        together(team.comm, lambda: None)  # it is there
        if not team.ranks.is_lead:
            stack.enter_context(_output_to(folder / f"rank{team.ranks.rank}.log"))
        if team.ranks.world_size > 1:
            record_flights_in(str(folder))
        yield


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """stdout and stderr of this process and its children, appended to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for stream in (1, 2):
            os.dup2(target, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in zip((1, 2), kept, strict=True):
            os.dup2(before, stream)
            os.close(before)
        os.close(target)
