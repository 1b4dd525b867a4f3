"""What a verification says. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.manifest import Manifest

Level = Literal["structure", "digest", "deep"]  # each with all that comes before
Verdict = Literal["ok", "complete", "incomplete", "damaged", "pruned", "foreign"]
Kind = Literal["missing", "damage", "note"]

GOOD: tuple[Verdict, ...] = ("ok", "complete")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        file: relative to the checkpoint; "" for the folder itself.
        tensor: the tensor that is hit, where it can be told.
        what: in words, to be read behind the file's name.
        kind: "missing" makes a checkpoint incomplete, "damage" damaged, a "note" neither.
    """

    file: str
    tensor: str | None
    what: str
    kind: Kind = "damage"

    def __str__(self) -> str:
        tensor = f" tensor `{self.tensor}`" if self.tensor is not None else ""
        return f"{self.file or 'the folder'}:{tensor} {self.what}"

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "tensor": self.tensor, "what": self.what, "kind": self.kind}


@dataclass
class Check:
    """One kind of test and what it found. `detail` says what it covered, or why it was left out."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    detail: str = ""
    skipped: bool = False

    @property
    def status(self) -> Literal["passed", "failed", "skipped"]:
        if any(finding.kind != "note" for finding in self.findings):
            return "failed"
        return "skipped" if self.skipped else "passed"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "detail": self.detail,
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass
class Report:
    """The verdict on one checkpoint.

    Verdicts: "ok" (every byte proven by digests), "complete" (all that could be checked holds; the skipped checks say
    what could not), "incomplete", "damaged", "pruned" (only `eval/` is left), "foreign" (no checkpoint).
    """

    path: Path
    level: Level
    verdict: Verdict
    checks: list[Check] = field(default_factory=list)
    counters: Counters | None = None
    manifest: Manifest | None = None
    bytes: int = 0
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        return [finding for check in self.checks for finding in check.findings]

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD

    @property
    def reason(self) -> str:
        """The first thing that makes the verdict what it is, in one line."""
        serious = [f for f in self.findings if f.kind == "damage"] or [f for f in self.findings if f.kind == "missing"]
        if not serious:
            return {"pruned": "only its eval/ is left", "foreign": "is no checkpoint"}.get(self.verdict, "")
        more = f" (and {len(serious) - 1} more)" if len(serious) > 1 else ""
        return f"{serious[0]}{more}"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "verdict": self.verdict,
            "level": self.level,
            "counters": self.counters.to_dict() if self.counters else None,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass
class RunReport:
    """The verdicts on the checkpoints of a run, lowest update first, and the one that a resume takes."""

    path: Path
    level: Level
    rows: list[Report]
    resume_from: Path | None

    @property
    def verdict(self) -> Verdict:
        """ "damaged" if any checkpoint is; else that of the one to resume from; "incomplete" where there is none."""
        if any(row.verdict == "damaged" for row in self.rows):
            return "damaged"
        return next((row.verdict for row in self.rows if row.path == self.resume_from), "incomplete")

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "verdict": self.verdict,
            "level": self.level,
            "resume_from": str(self.resume_from) if self.resume_from else None,
            "checks": [self._row_check(row) for row in self.rows],
            "checkpoints": [row.to_json() for row in self.rows],
        }

    @staticmethod
    def _row_check(row: Report) -> dict[str, Any]:
        """A checkpoint as one check of the run, its findings with paths relative to the run."""
        findings = [{**f.to_json(), "file": f"{row.path.name}/{f.file}".rstrip("/")} for f in row.findings]
        status = "passed" if row.is_good else ("skipped" if row.verdict in ("pruned", "foreign") else "failed")
        return {"name": row.path.name, "status": status, "detail": row.verdict, "findings": findings}
