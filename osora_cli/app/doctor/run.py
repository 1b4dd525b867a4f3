"""All checks in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from osora_cli.app.doctor import compute, extras, media, system
from osora_cli.app.doctor.finding import Check, Finding, guarded

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Diagnosis:
    """What was found, in the order of the checks."""

    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether nothing fails that a training needs."""
        return all(finding.status != "fail" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "healthy": self.healthy,
            "findings": [finding.to_json() for finding in self.findings],
        }


def checks(outputs: Path) -> dict[str, Check]:
    """Every check by the name of its subject."""
    return {
        "versions": compute.versions,
        "GPU": compute.devices,
        "conv3d": compute.convolution,
        "decoder": media.decoder,
        "disk": partial(system.disk, outputs),
        "shared memory": system.shared_memory,
        "limits": system.limits,
        "colossalai": extras.colossalai,
        "tensornvme": extras.tensornvme,
        "build tools": extras.build_tools,
        "extras": extras.others,
    }


def diagnose(outputs: Path, tell: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Run all checks. `outputs`: the folder that runs go to; it need not exist. `tell`: each subject as it begins."""
    findings: list[Finding] = []
    for name, check in checks(outputs).items():
        tell(name)
        findings += guarded(name, check)
    return Diagnosis(findings)
