"""LPIPS as a metric of reconstructions: its weights, found on this machine, and what its numbers hang on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from osora_cli.errors import SetupError
from osora_cli.model.lpips_weights import FETCH_COMMAND, load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS


@dataclass(frozen=True)
class LpipsMetric:
    """LPIPS that scores, and what its numbers hang on.

    Attributes:
        net: fp32.
        path: the weights' file.
        sha256: of the file, hex.
    """

    net: LPIPS
    path: Path
    sha256: str


def find_lpips(wanted: bool | None, notes: list[str]) -> LpipsMetric | None:
    """LPIPS on the CPU, in fp32. None where it is not wanted, or cannot be had and `wanted` is None: `notes` says so.

    Raises:
        SetupError: it is wanted (True), and its weights are not on this machine or not whole.
    """
    if wanted is False:
        return None
    try:
        path = locate_lpips(without="`--no-lpips`")
        net = load_lpips(path)
    except SetupError as error:
        if wanted:
            raise
        notes.append(f"LPIPS is left out: {error.message}; fetch them with `{FETCH_COMMAND}`")
        return None
    return LpipsMetric(net, path, hashlib.sha256(path.read_bytes()).hexdigest())
