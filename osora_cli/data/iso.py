"""The few facts of an mp4 or mov header that FFmpeg does not hand out: how tracks are turned, and what to be wary of.

Reads box headers and a few dozen bytes (ISO 14496-12, 4.2 and 8): a file of any length costs a handful of small reads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from osora_cli.data.media_types import AnyPath
from osora_cli.data.orientation import Orientation

_Matrix = tuple[float, float, float, float]
_MAX_BOXES = 10_000


@dataclass
class IsoHeader:
    """What the header of an mp4 or mov says beside what FFmpeg reports.

    Attributes:
        fragmented: samples may be listed outside the header, so its counts are not the whole.
        orientations: by track id.
        descriptions: by track id, the number of codec descriptions; above one, the picture may change in mid-stream.
    """

    fragmented: bool = False
    orientations: dict[int, Orientation] = field(default_factory=dict)
    descriptions: dict[int, int] = field(default_factory=dict)


def read_iso_header(path: AnyPath) -> IsoHeader | None:
    """Reads the header, or returns None when the file is no mp4 or mov, or its header is unusual."""
    header: IsoHeader | None = None
    try:
        if not Path(path).is_file():
            return None  # a pipe would wait for a writer
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for kind, begin, end in _boxes(file, 0, size):
                if kind == b"moov" and header is None:
                    header = _movie(file, begin, end)
                elif kind == b"moof" and header is not None:
                    header.fragmented = True
    except (OSError, struct.error, ValueError):
        return None
    return header


def _boxes(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, begin, end) of the contents of each box between two places."""
    for _ in range(_MAX_BOXES):
        if begin + 8 > end:
            return
        file.seek(begin)
        size, kind = struct.unpack(">I4s", file.read(8))
        head = 8
        if size == 1:
            (size,) = struct.unpack(">Q", file.read(8))
            head = 16
        elif size == 0:
            size = end - begin
        if size < head:
            return
        yield kind, begin + head, min(begin + size, end)
        begin += size


def _movie(file: BinaryIO, begin: int, end: int) -> IsoHeader | None:
    header = IsoHeader()
    movie: _Matrix = (1, 0, 0, 1)
    tracks: dict[int, _Matrix] = {}
    for kind, inner, outer in _boxes(file, begin, end):
        if kind == b"mvhd":
            movie = _matrix(file, inner, 36 if _version(file, inner) == 0 else 48)
        elif kind == b"mvex":
            header.fragmented = True
        elif kind == b"cmov":
            return None
        elif kind == b"trak":
            _track(file, inner, outer, header, tracks)
    for track, matrix in tracks.items():
        header.orientations[track] = Orientation.of_matrix(*_product(matrix, movie))
    return header


def _track(file: BinaryIO, begin: int, end: int, header: IsoHeader, tracks: dict[int, _Matrix]) -> None:
    track, entries = 0, 1
    for kind, inner, outer in _boxes(file, begin, end):
        if kind == b"tkhd":
            version = _version(file, inner)
            file.seek(inner + (12 if version == 0 else 20))
            (track,) = struct.unpack(">I", file.read(4))
            tracks[track] = _matrix(file, inner, 40 if version == 0 else 52)
        elif kind == b"mdia":
            place = _find(file, inner, outer, (b"minf", b"stbl", b"stsd"))
            if place is not None:
                file.seek(place + 4)
                (entries,) = struct.unpack(">I", file.read(4))
    header.descriptions[track] = entries


def _find(file: BinaryIO, begin: int, end: int, kinds: tuple[bytes, ...]) -> int | None:
    for kind, inner, outer in _boxes(file, begin, end):
        if kind == kinds[0]:
            return inner if len(kinds) == 1 else _find(file, inner, outer, kinds[1:])
    return None


def _version(file: BinaryIO, begin: int) -> int:
    file.seek(begin)
    (version,) = struct.unpack(">B", file.read(1))
    return int(version)


def _matrix(file: BinaryIO, begin: int, offset: int) -> _Matrix:
    """a, b, c, d of the matrix `a b u; c d v; x y w` in 16.16 fixed point."""
    file.seek(begin + offset)
    a, b, _, c, d = struct.unpack(">5i", file.read(20))
    return a / 65536, b / 65536, c / 65536, d / 65536


def _product(first: _Matrix, second: _Matrix) -> _Matrix:
    """The turn of `first` followed by that of `second`, for row vectors."""
    a, b, c, d = first
    e, f, g, h = second
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h
