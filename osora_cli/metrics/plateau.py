"""Whether a logged loss still falls: the slope of its logarithm with a confidence band.

The last third of the curve is cut into blocks of equally many records. Block means of the log-loss hardly depend on
each other where blocks are longer than the memory of the noise; what dependence is left is measured from the lag-1
autocorrelation of their residuals, and widens the band as it does for a first-order process. A line through the block
means has a slope with a t-distributed error. Spikes are drawn in to four robust standard deviations first.

`flat` is a statement of its own and not the absence of proof that it falls: the whole band has to lie above a fall of
`material` over the stretch. A loss that is too noisy or too young to tell is `unclear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
MATERIAL = 0.02  # a fall by less than this share over the stretch is none
SHARE = 1 / 3  # of the curve, from its end
BLOCKS = 20
MIN_RECORDS = 2 * BLOCKS
_CLIP = 4.0  # robust standard deviations
_PER = 1000  # updates that rates are stated for

Floats = NDArray[np.float64]
Status = Literal["falling", "flat", "rising", "unclear", "short"]


@dataclass(frozen=True)
class Trend:
    """What the end of a curve does.

    Attributes:
        status: `short`: fewer than MIN_RECORDS records in the stretch, and nothing else is said.
        first, last: updates that the stretch reaches from and to.
        records: in the stretch.
        fall, low, high: share by which the loss falls in 1,000 updates, and its confidence band; negative: it rises.
        since: where `flat`, the update from which on it is.
    """

    status: Status
    first: int
    last: int
    records: int
    fall: float | None = None
    low: float | None = None
    high: float | None = None
    since: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "first_update": self.first,
            "last_update": self.last,
            "records": self.records,
            "fall_per_1000_updates": self.fall,
            "low": self.low,
            "high": self.high,
            "confidence": CONFIDENCE,
            "flat_since": self.since,
        }


@dataclass(frozen=True)
class _Line:
    """Slope of the log-loss an update, its band, and the updates it spans."""

    slope: float
    low: float
    high: float
    span: float

    @property
    def flat(self) -> bool:
        """Whether the band rules a fall of MATERIAL over the span out."""
        return self.low * self.span > np.log1p(-MATERIAL)

    @property
    def rising(self) -> bool:
        return self.low > 0 and self.slope * self.span > -np.log1p(-MATERIAL)


def trend(steps: Sequence[int], values: Sequence[float], *, confidence: float = CONFIDENCE) -> Trend:
    """What the last third of a curve does.

    Args:
        steps: updates, in any order; of several values of one update the last given counts.
        values: the loss; what is not a positive finite number is left out.
        confidence: of the two-sided band. Each wrong statement (that a flat loss falls, that a loss which falls by
            MATERIAL is flat) then has half of what is left as its nominal probability, a look.
    """
    x, y = _clean(steps, values)
    if len(x) == 0:
        return Trend("short", 0, 0, 0)
    begin = int(np.searchsorted(x, x[-1] - SHARE * (x[-1] - x[0])))
    count = len(x) - begin
    first, last = int(x[begin]), int(x[-1])
    if count < MIN_RECORDS:
        return Trend("short", first, last, count)
    size = count // BLOCKS
    middles, means = _block_means(x, y, size)
    line = _fit(middles[-BLOCKS:], means[-BLOCKS:], confidence)
    since = None
    if line.rising:
        status: Status = "rising"
    elif line.flat:
        status, since = "flat", _since(x, middles, means, size, confidence)
    else:
        status = "falling" if line.high < 0 else "unclear"
    fall, low, high = (float(-np.expm1(_PER * slope)) for slope in (line.slope, line.high, line.low))
    return Trend(status, first, last, count, fall, low, high, since)


def _clean(steps: Sequence[int], values: Sequence[float]) -> tuple[Floats, Floats]:
    """Updates in order, each once, and the logarithm of the loss there."""
    by_step = dict(zip(steps, values, strict=True))
    pairs = [(s, by_step[s]) for s in sorted(by_step) if np.isfinite(by_step[s]) and by_step[s] > 0]
    if not pairs:
        return np.empty(0), np.empty(0)
    x, v = np.array(pairs, dtype=np.float64).T
    return x, np.log(v)


def _block_means(x: Floats, y: Floats, size: int) -> tuple[Floats, Floats]:
    """Mean update and mean log-loss of blocks of `size` records, counted from the end: the first few are left out."""
    blocks = len(x) // size
    x_blocks, y_blocks = (a[len(a) - blocks * size :].reshape(blocks, size) for a in (x, y))
    centre = np.median(y_blocks, axis=1, keepdims=True)
    residual = y_blocks - centre
    # The scale of the end: an early, steep part must not set how far a spike may reach there.
    bound = _CLIP * 1.4826 * float(np.median(np.abs(residual[-BLOCKS:])))
    return x_blocks.mean(axis=1), (centre + residual.clip(-bound, bound)).mean(axis=1)


def _fit(x: Floats, y: Floats, confidence: float) -> _Line:
    """A line by least squares, the error of its slope widened by the autocorrelation of the residuals."""
    n = len(x)
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    residual = y - y.mean() - slope * dx
    squares = float(residual @ residual)
    lag = float(residual[1:] @ residual[:-1]) / squares if squares > 0 else 0.0
    # Residuals of a line look less dependent than the noise is, by about (2 + 4 r) / n.
    r = min(max(lag + (2 + 4 * max(lag, 0.0)) / n, 0.0), 0.9)
    inflation = (1 + r) / (1 - r)
    error = float(np.sqrt(squares / (n - 2) / (dx @ dx) * inflation))
    reach = t_quantile((1 + confidence) / 2, max(3.0, (n - 2) / inflation)) * error
    return _Line(slope, slope - reach, slope + reach, float(x[-1] - x[0]) * n / (n - 1))


def _since(x: Floats, middles: Floats, means: Floats, size: int, confidence: float) -> int:
    """How far back a stretch can begin and still be flat as a whole: the update it begins with."""
    start = len(means) - BLOCKS
    while start > 0 and _fit(middles[start - 1 :], means[start - 1 :], confidence).flat:
        start -= 1
    return int(x[len(x) - (len(means) - start) * size])


def t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t by its expansion around the normal's (Abramowitz and Stegun 26.7.5); for `dof` from 3."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof ** (k + 1) for k, term in enumerate(terms))
