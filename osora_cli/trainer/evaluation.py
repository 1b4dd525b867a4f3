"""What a run looks at while it trains. The loop owns when; an evaluator owns what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        scores: figures by name, each finite or left out; logged as `eval/NAME`.
        pictures: uint8 [H, W, 3] by name, for TensorBoard and `RUN/eval/`.
    """

    scores: dict[str, float]
    pictures: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


class Evaluator(Protocol):
    """Scores the networks as they are now. It changes nothing that a later step depends on, random states included."""

    every: int
    """Updates between evaluations."""

    def evaluate(self, update: int) -> Evaluation:
        """Score the weights after `update` updates."""


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Every part of the network in evaluation mode meanwhile, then in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
