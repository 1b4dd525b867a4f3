"""RUN/eval/: the pictures of each evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from osora_cli.report.base import RunStart, SilentObserver

FOLDER = "eval"


class EvalPictures(SilentObserver):
    """Writes each picture as RUN/eval/update0001000-NAME.png. Nothing there is ever removed; an update that is done
    again after a resume is written over."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def on_start(self, info: RunStart) -> None:
        self._folder = info.folder / FOLDER

    def on_evaluation(
        self, update: int, scores: Mapping[str, float], pictures: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        if self._folder is None or not pictures:
            return
        self._folder.mkdir(exist_ok=True)
        for name, pixels in pictures.items():
            path = self._folder / f"update{update:07d}-{name}.png"
            temporary = self._folder / f".{path.name}.{os.getpid()}.tmp"
            Image.fromarray(pixels).save(temporary, format="PNG")
            temporary.replace(path)
