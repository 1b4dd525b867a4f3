"""What an autoencoder's training refuses when its config is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.process import osora


@pytest.mark.parametrize("command", ["vae", "vae-disc"])
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("sp-size", "an autoencoder has no token sequence that ranks could share"),
        ("tp-size", "there is no tensor parallelism"),
    ],
)
def test_parallelism_that_there_is_not(tmp_path: Path, command: str, key: str, reason: str) -> None:
    """Before the table is looked at, which is not there."""
    refused = osora(
        "train", command, f"demo/{command.replace('-', '_')}", "--plugin", "hybrid", f"--plugin-config.{key}", "2",
        cwd=tmp_path,
    )  # fmt: skip
    assert refused.code == 2
    assert f"`plugin_config.{key.replace('-', '_')}` is `2`, and {reason}" in refused.stderr
    assert "fix: " in refused.stderr
    assert not (tmp_path / "outputs").exists()
