"""`osora data check`: what the bucket rules of a training's config make of a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osora_cli.app.data.input import check_buckets, load_table, make_sampler
from osora_cli.config.faults import ConfigFaults
from osora_cli.config.load import Loaded, load_config
from osora_cli.config.overrides import Override
from osora_cli.config.registry import COMMANDS, Command
from osora_cli.config.schema import TrainConfig
from osora_cli.data.buckets import Bucket
from osora_cli.data.check import REASONS, BucketReport, sampler_report
from osora_cli.data.meta_output import check_output, write_csv_rows
from osora_cli.data.sampler import BucketSampler
from osora_cli.data.table import ClipTable
from osora_cli.errors import ConfigError, DataError, UsageError

_CHUNK = 1 << 16
_MOST = 10**9
_CLIP_COLUMNS = ("row", "path", "num_frames", "fps", "used_frames", "height", "width", "bucket", "reason")


@dataclass(frozen=True)
class CheckResult:
    """A table under the rules of a config.

    Attributes:
        command: the training whose config it is.
        report: buckets, batches, and the clips that are left out.
        missing: rows whose file does not exist; None when that was not looked at.
        error: why a training would end before its model is built; None: it would not.
    """

    command: str
    table: ClipTable
    seed: int
    sampler: BucketSampler
    report: BucketReport
    missing: list[int] | None
    error: DataError | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; every clip that is left out is in it."""
        report = self.report
        out: dict[str, Any] = {
            "table": str(self.table.source),
            "table_digest": self.table.digest,
            "command": self.command,
            "seed": self.seed,
            "epoch": report.epoch,
            "ranks": report.num_replicas,
            "clips": report.num_clips,
            "batches": report.micro_batches,
            "batches_per_rank": report.steps,
            "rank_balance": round(report.rank_balance, 6),
            "buckets": [
                {
                    **count.bucket._asdict(),
                    "clips": count.clips,
                    "batches": count.micro_batches,
                    "unused_clips": count.remainder,
                    "pixels_per_batch": count.bucket.pixels,
                    "cost_share": round(count.cost_share, 6),
                }
                for count in report.buckets
            ],
            "left_out_by_reason": {REASONS[reason]: count for reason, count in report.left_out.items()},
            "left_out": list(self.left_out()),
            "missing_files": None if self.missing is None else self._paths(self.missing),
            "notes": list(self.table.notes),
        }
        return out if self.error is None else {**out, "error": self._error_json(self.error)}

    @staticmethod
    def _error_json(error: DataError) -> dict[str, Any]:
        """As the command line says an error that ends it."""
        names = ("message", "where", "allowed", "hint", "exit_code")
        return {name: getattr(error, name) for name in names}

    def left_out(self) -> Iterator[dict[str, Any]]:
        """Every clip that is in no bucket this epoch, and why. Of large tables there are many: no more than needed."""
        reasons = self.report.reasons
        rows = self.report.rows_left_out()
        paths = self._paths(rows.tolist())
        for row, path in zip(rows.tolist(), paths, strict=True):
            yield {"row": row, "path": path, "reason": REASONS[reasons[row]]}

    def examples(self, count: int) -> list[str]:
        """The first `count` clips of each reason in words: their frames, those that are used, what was asked."""
        lines = []
        for reason in self.report.left_out:
            for row in self.report.rows_left_out(reason)[:count].tolist():
                lines.append(f"left out: row {row}, {self.table.path_of(row)}: {self.report.explain(row)}")
        return lines

    def write_clips(self, output: Path) -> None:
        """A CSV with a line for every clip of the table: frames, frames used, bucket, or why it is in none.

        Raises:
            SetupError: it cannot be written.
        """
        write_csv_rows(output, _CLIP_COLUMNS, self._clip_lines())

    def _clip_lines(self) -> Iterator[tuple[str, ...]]:
        ids, reasons = self.sampler.bucket_ids(self.report.epoch), self.report.reasons
        table, used = self.table, self.sampler.used_frames
        names = [_name(bucket) for bucket in self.sampler.table.buckets]
        for first in range(0, len(self.table), _CHUNK):
            rows = range(first, min(first + _CHUNK, len(self.table)))
            for row, path in zip(rows, self._paths(rows), strict=True):
                fps = "" if math.isnan(table.fps[row]) else repr(float(table.fps[row]))
                numbers = (table.num_frames[row], fps, used[row], table.height[row], table.width[row])
                bucket = names[ids[row]] if ids[row] >= 0 else ""
                reason = "" if ids[row] >= 0 else REASONS[reasons[row]]
                yield (str(row), path, *map(str, numbers), bucket, reason)

    def _paths(self, rows: Sequence[int]) -> list[str]:
        return self.table.paths_of(rows)


def _name(bucket: Bucket) -> str:
    return f"{bucket.resolution} {bucket.frames} frames {bucket.width}x{bucket.height}"


def load_training_config(config: str | None, overrides: Sequence[Override] = ()) -> tuple[Command, Loaded[TrainConfig]]:
    """A config, and the training command that it is one for: the first whose schema it fulfils.

    Raises:
        ConfigError: there is no such config, or no training takes it: then what the nearest one finds wrong.
    """
    nearest: ConfigFaults | None = None
    for command in COMMANDS.values():
        if not command.trains or not issubclass(command.schema, TrainConfig):
            continue
        try:
            return command, load_config(config, command.schema, overrides, default=command.default)
        except ConfigFaults as faults:
            if nearest is None or len(faults.faults) < len(nearest.faults):
                nearest = faults
    assert nearest is not None, "a training command exists"
    of = [] if config is None else [command for command in COMMANDS.values() if _is_config_of(command, config)]
    if config is not None and of and not any(command.trains for command in of):
        said = f"`{config}` is a config of `osora {of[0].name}`, and of no training"
        raise ConfigError(said, where="CONFIG") from nearest
    raise nearest


def _is_config_of(command: Command, config: str) -> bool:
    try:
        load_config(config, command.schema, (), default=command.default)
    except ConfigError:
        return False
    return True


def check_table(
    table: Path,
    config: TrainConfig,
    command: str,
    *,
    ranks: int = 1,
    epoch: int = 0,
    files: bool = True,
    clips: Path | None = None,
) -> CheckResult:
    """What `command` would read of `table` with `config`.

    Args:
        ranks: that read different clips.
        epoch: counted from 0; where probabilities are below 1 epochs differ.
        files: whether to look if every file exists.
        clips: a CSV to write with a line for every clip.

    Raises:
        ConfigError: `bucket_config` is wrong, or asks for what the autoencoder cannot do.
        DataError: the table is missing or unreadable, lacks columns or holds values that cannot be. That no bucket
            gets a batch or too many files are missing is a result's `error`.
        UsageError: `ranks`, `epoch` or `clips` is not allowed.
        SetupError: `clips` cannot be written.
    """
    for name, value, least in (("ranks", ranks, 1), ("epoch", epoch, 0)):
        if not least <= value <= _MOST:
            raise UsageError(f"{name} is `{value}`", allowed=f"{least} to {_MOST}")
    if clips is not None:
        check_output(clips, (".csv",))
        if clips.resolve() == table.resolve():
            raise UsageError(f"the lines of clips would replace the table `{table}` itself", where="--clips-out")
    loaded = load_table(config.dataset.model_copy(update={"data_path": str(table)}))
    check_buckets(config)
    sampler = make_sampler(loaded, config, num_replicas=ranks)
    report = sampler_report(sampler, epoch)
    missing = loaded.missing_files() if files else None
    error = _error(loaded, report, missing, config.dataset.max_bad_fraction)
    result = CheckResult(command, loaded, config.seed, sampler, report, missing, error)
    if clips is not None:
        result.write_clips(clips)
    return result


def _error(
    table: ClipTable, report: BucketReport, missing: list[int] | None, max_bad_fraction: float
) -> DataError | None:
    """Why a training would end at once."""
    if missing and len(missing) > max_bad_fraction * len(table):
        return table.missing_files_error(missing)
    try:
        report.require_batches()
    except DataError as error:
        return error
    return None
