"""What the media functions share: the facts about an item, the error, and which files are stills."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from osora_cli.errors import DataError

# What every function takes as a path.
AnyPath = str | os.PathLike[str]

# An item with one of these endings is a still, every other one is opened as a video.
STILL_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
# What a folder is searched for, beside stills.
VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv", ".wmv", ".ogv"}
    | {".3gp", ".gif"}
)


class MediaError(DataError):
    """One file cannot be used. `path` and `reason` are kept apart, so that a report can list them."""

    def __init__(self, path: AnyPath, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"`{os.fspath(path)}`: {reason}", hint=hint)
        self.path = Path(path)
        self.reason = reason

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild, (type(self), self.path, self.reason, self.hint)


def _rebuild(kind: type[MediaError], path: Path, reason: str, hint: str | None) -> MediaError:
    return kind(path, reason, hint=hint)


@dataclass(frozen=True)
class MediaInfo:
    """The facts about one item.

    Attributes:
        num_frames: frames that `read_frames` delivers, 1 for a still.
        height, width: in pixels, as displayed (rotation tags and EXIF orientation applied).
        fps: average frames per second, rounded to 3 decimals; NaN for a still.
        is_image: the item is a still.
    """

    num_frames: int
    height: int
    width: int
    fps: float
    is_image: bool

    @property
    def aspect_ratio(self) -> float:
        """Height divided by width."""
        return self.height / self.width

    @property
    def resolution(self) -> int:
        """Height times width, in pixels."""
        return self.height * self.width

    @classmethod
    def still(cls, height: int, width: int) -> MediaInfo:
        return cls(num_frames=1, height=height, width=width, fps=math.nan, is_image=True)


def is_still(path: AnyPath) -> bool:
    """Whether the item is a still: a matter of its extension alone, in any case of letters."""
    return Path(path).suffix.lower() in STILL_EXTENSIONS
