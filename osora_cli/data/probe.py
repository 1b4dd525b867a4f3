"""The facts about one item, without decoding it."""

from __future__ import annotations

import os

from osora_cli.data.frame_index import build_index
from osora_cli.data.media_types import MediaInfo, is_still
from osora_cli.data.stills import read_still, still_size


def probe(path: str | os.PathLike[str], *, exact: bool = False) -> MediaInfo:
    """Number of frames, displayed size and average rate of a video or still.

    Args:
        path: the file. It is a still iff its extension says so.
        exact: decode everything, to count what a damaged file still gives.

    Raises:
        MediaError: the file cannot be used, with the reason.
    """
    if is_still(path):
        height, width = read_still(path).shape[:2] if exact else still_size(path)
        return MediaInfo.still(height, width)
    index = build_index(path)
    return MediaInfo(index.num_frames, index.height, index.width, round(index.fps, 3), is_image=False)
