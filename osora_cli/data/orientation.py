"""How a decoded picture is turned before it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


@dataclass(frozen=True)
class Orientation:
    """Transpose first, then the two flips: the eight ways to turn or mirror a picture by right angles."""

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @classmethod
    def of_matrix(cls, a: float, b: float, c: float, d: float) -> Orientation:
        """From a display matrix (ISO 14496-12, 8.3.2), which sends column x and row y to (a x + c y, b x + d y).

        Other angles are taken as the nearest right one.
        """
        if abs(b) + abs(c) > abs(a) + abs(d):
            return cls(transpose=True, flip_rows=b < 0, flip_columns=c < 0)
        return cls(flip_rows=d < 0, flip_columns=a < 0)

    @classmethod
    def of_frame(cls, frame: VideoFrame) -> Orientation:
        """From the display matrix that FFmpeg hands out with a frame, if any."""
        data = frame.side_data.get("DISPLAYMATRIX")
        if data is None:
            return cls()
        a, b, _, c, d = (float(value) for value in np.frombuffer(cast("memoryview", data), dtype=np.int32)[:5])
        return cls.of_matrix(a, b, c, d)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) as displayed, of a picture of that coded size."""
        return (width, height) if self.transpose else (height, width)

    def apply(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[H, W, 3]` as coded to `[H, W, 3]` as displayed, without a copy."""
        if self.transpose:
            picture = picture.swapaxes(0, 1)
        if self.flip_rows:
            picture = picture[::-1]
        if self.flip_columns:
            picture = picture[:, ::-1]
        return picture
