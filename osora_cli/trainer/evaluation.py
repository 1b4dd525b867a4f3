"""What a run looks at while it trains. The loop owns when; an evaluator owns what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
