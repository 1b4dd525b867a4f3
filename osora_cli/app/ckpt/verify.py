"""`osora ckpt verify`: the verdict on a checkpoint or a run, as a result that prints itself nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osora_cli.checkpoint.findings import Level, Report, RunReport, Verdict
from osora_cli.checkpoint.run_folders import looks_like_run, told_of_runs
from osora_cli.checkpoint.verify import is_checkpoint, verify, verify_run
from osora_cli.errors import CheckpointError, UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class VerifyResult:
    """A report with what `--strict` makes of it."""

    report: Report | RunReport
    strict: bool

    @property
    def verdict(self) -> Verdict:
        return self.report.verdict

    @property
    def rows(self) -> list[Report]:
        """One report a checkpoint."""
        return self.report.rows if isinstance(self.report, RunReport) else [self.report]

    @property
    def resume_from(self) -> Path | None:
        """For a run the checkpoint that a resume takes."""
        return self.report.resume_from if isinstance(self.report, RunReport) else None

    @property
    def exit_code(self) -> int:
        """0 when the checkpoint (of a run: the one to resume from, and no other is damaged) is good, else 4."""
        good = self.verdict == "ok" or (self.verdict == "complete" and not self.strict)
        return 0 if good else CheckpointError.exit_code

    def to_json(self) -> dict[str, Any]:
        """One object: schema_version, path, kind, verdict, checks with their findings; for a run also resume_from."""
        kind = "run" if isinstance(self.report, RunReport) else "checkpoint"
        return {"schema_version": SCHEMA_VERSION, "kind": kind, **self.report.to_json()}


def verify_path(
    path: Path | str,
    *,
    quick: bool = False,
    deep: bool = False,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Verify a checkpoint or all of a run.

    Args:
        path: either; a run is a folder with checkpoints in it.
        quick: only the structure; the tensors' bytes are not read.
        deep: every byte, and then what the values must satisfy.
        strict: only "ok" counts as good, "complete" does not.
        progress: called with (bytes read, bytes to read) of each checkpoint.

    Raises:
        UsageError: quick and deep at once.
        CheckpointError: the path does not exist, or is a folder of runs.
    """
    if quick and deep:
        raise UsageError("`--quick` and `--deep` exclude each other", allowed="one of them, or neither")
    path = Path(path)
    level: Level = "structure" if quick else ("deep" if deep else "digest")
    if not is_checkpoint(path) and looks_like_run(path):
        return VerifyResult(verify_run(path, level, progress=progress, networks=_network_shapes), strict)
    inside = told_of_runs(path)
    if inside is not None and not is_checkpoint(path):
        raise CheckpointError(f"`{path}` is neither a checkpoint nor a run", hint=inside)
    return VerifyResult(verify(path, level, progress=progress, networks=_network_shapes), strict)


def _network_shapes(run: Path) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Only `--deep` asks, and the configs that it takes to answer cost more than a quick verification."""
    from osora_cli.app.ckpt.network import network_shapes

    return network_shapes(run)
