"""What a kind of training brings: its checked input, its networks, its batches, what it looks at meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.config.schema import TrainConfig
from osora_cli.data.check import BucketReport
from osora_cli.data.sampler import BucketSampler, Position
from osora_cli.data.table import ClipTable
from osora_cli.engine.base import Engine
from osora_cli.trainer.evaluation import Evaluator
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.saving import RunState

# The note that names the pretrained weights of a training begins so.
STARTING = "starting from "


class Training(Protocol):
    """A training whose input has been checked. Nothing is built and no folder is made before `build`.

    Attributes:
        config: the resolved config.
        table, sampler: the clips and their order.
        report: what that order makes of the clips; it may have no batch.
        notes: what the user should be told once.
    """

    @property
    def config(self) -> TrainConfig: ...

    table: ClipTable
    sampler: BucketSampler
    report: BucketReport
    notes: list[str]

    def check_start(self, reader: CheckpointReader | None) -> None:
        """Look at what the networks start from: the checkpoint to go on from, or pretrained weights.

        Raises:
            CheckpointError: it is missing, damaged, or of other networks.
            ConfigError: the config asks for a start that cannot be.
        """

    def build(self, engine: Engine, reader: CheckpointReader | None) -> RunState:
        """Networks with their optimizers, the task, the average of weights; the caller loads `reader` into them."""

    def feed(self, engine: Engine, start: Position) -> Feed:
        """The batches from `start` on."""

    def evaluator(self, engine: Engine, state: RunState, folder: Path) -> Evaluator | None:
        """What is scored while it trains; None: nothing. `folder` is the run's."""


@runtime_checkable
class WarmsUp(Protocol):
    """A training that has something to do once, when all is built and loaded and before its first update."""

    def warm_up(self, engine: Engine, state: RunState, tell: Callable[[str], None]) -> None:
        """All ranks call it. It changes no state. `tell` takes what the user should see while it lasts."""
