"""The facts about one item: from its header, from its packets, or, when asked for, by decoding it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from osora_cli.data.frame_index import REORDER, PacketScan, build_index, frame_rate, header_geometry
from osora_cli.data.iso import read_iso_header
from osora_cli.data.media_types import AnyPath, MediaInfo, is_still
from osora_cli.data.stills import read_still, still_size
from osora_cli.data.streams import open_video, packets_of


def probe(path: AnyPath, *, exact: bool = False) -> MediaInfo:
    """Number of frames, displayed size and average rate of a video or still.

    The number is the one that `read_frames` delivers from an undamaged file. An mp4 or mov tells it by its sample
    table (about 2 ms, whatever its length); of other containers the packets are listed, which reads the file through,
    and one picture is decoded for its orientation. Pixels are counted as stored: a sample aspect ratio is not applied.

    Args:
        path: the file. It is a still iff its extension says so.
        exact: decode everything, and count up to the first damage.

    Raises:
        MediaError: the file cannot be used, with the reason.
    """
    if is_still(path):
        height, width = read_still(path).shape[:2] if exact else still_size(path)
        return MediaInfo.still(height, width)
    info = None if exact else _from_sample_table(path)
    if info is not None:
        return info
    index = build_index(path, exact=exact)
    return MediaInfo(index.num_frames, index.height, index.width, round(index.fps, 3), is_image=False)


def _from_sample_table(path: AnyPath) -> MediaInfo | None:
    """What the sample table of an mp4 or mov says, or None where more has to be looked at.

    FFmpeg's own index is used: edit lists are applied to it. PyAV hands it out from version 17 on.
    """
    iso = read_iso_header(path)
    if iso is None or iso.fragmented:
        return None
    with open_video(path) as (container, stream):
        entries = getattr(stream, "index_entries", None)
        known = header_geometry(stream, iso)
        if not entries or known is None or not stream.average_rate or iso.descriptions.get(stream.id) != 1:
            return None
        end = Path(path).stat().st_size
        count = sum(not entry.is_discard and 0 < entry.size <= end - entry.pos for entry in entries)
        head = PacketScan.of(stream)
        for packet in islice(packets_of(container, stream), REORDER):
            head.add(packet)
        head.end()
        fps = frame_rate(stream, None, trusted=True)
    if count == 0 or fps is None or head.doubt is not None:
        return None
    _, height, width = known
    return MediaInfo(count, height, width, round(fps, 3), is_image=False)
