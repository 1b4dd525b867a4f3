"""How many clips may fail before a run stops."""

from __future__ import annotations

import math
from collections.abc import Sequence

from osora_cli.data.clip_reader import Failure
from osora_cli.errors import DataError

# So many bad files never stop a run, however small the table (unless none at all may fail).
TOLERATED = 3
_DEVIATIONS = 4.0
_SHOWN = 10


class FailureLimit:
    """Counts clips read and clips that failed in one pass over (a rank's part of) a table.

    The pass stops when more different files have failed than

        max(3, f * n + 4 * sqrt(f * n * (1 - n / N)))

    where f is `max_fraction`, n the clips tried so far and N those of the whole pass: the share that is allowed, and
    early in the pass four standard deviations of a count drawn without replacement, so that a table just inside the
    limit is not stopped by where its bad files happen to lie. f = 0 stops at the first failure, f = 1 never.
    """

    def __init__(self, max_fraction: float, planned: int) -> None:
        self.max_fraction, self.planned = max_fraction, planned
        self.tried = 0
        self.failed: dict[int, Failure] = {}

    @property
    def limit(self) -> float:
        """Different files that may have failed by now."""
        if self.max_fraction >= 1:
            return math.inf
        if self.max_fraction <= 0:
            return 0.0
        mean = self.max_fraction * self.tried
        left = max(0.0, 1 - self.tried / max(1, self.planned))
        return max(float(TOLERATED), mean + _DEVIATIONS * math.sqrt(mean * left))

    def add(self, delivered: int, failures: Sequence[Failure]) -> None:
        """Counts a batch.

        Raises:
            DataError: too many have failed; the files are listed.
        """
        self.tried += delivered + len(failures)
        for failure in failures:
            self.failed.setdefault(failure.row, failure)
        if len(self.failed) > self.limit:
            raise self._error()

    def _error(self) -> DataError:
        shown = list(self.failed.values())[:_SHOWN]
        lines = [f"\n  row {failure.row}, {failure}" for failure in shown]
        more = f"\n  and {len(self.failed) - _SHOWN} more" if len(self.failed) > _SHOWN else ""
        return DataError(
            f"{len(self.failed)} of {self.tried} clips cannot be read, more than max_bad_fraction "
            f"`{self.max_fraction:g}` allows:{''.join(lines)}{more}",
            hint="look at these files, then run `osora data meta` over the table again, "
            "or raise `--dataset.max_bad_fraction`",
        )
