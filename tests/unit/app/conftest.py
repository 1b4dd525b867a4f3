"""What the tests of a reconstruction share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clips import make_clip
from support.recon import make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Clips of sizes and lengths that no stride divides, of two rates, with names that need care."""
    folder = tmp_path_factory.mktemp("clips")
    (folder / "sub").mkdir()
    return [
        make_clip(folder / "a b#1.mp4", frames=19, size=(70, 50), fps=25),
        make_clip(folder / "sub" / "a b#1.mov", frames=19, size=(66, 98), fps=30, rotate=90),
        make_clip(folder / "-ünï.mkv", frames=3, size=(64, 64), fps=12),
    ]
