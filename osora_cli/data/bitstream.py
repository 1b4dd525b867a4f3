"""The little that is read out of compressed packets: what the picture's size hangs on, and frames that are never shown.

None of it is decoding: a few bytes at the head of key frames.
"""

from __future__ import annotations

import re

# DivX 5 marks a stream whose packets hold two frames by a trailing `p` in its version text.
_PACKED = re.compile(rb"DivX\d+(?:b|Build)\d+p")
_START_CODE = re.compile(rb"\x00*\x00\x00\x01")
_HEAD = 4096


def has_lengths(extradata: bytes | None) -> bool:
    """Whether NAL units are kept apart by 4-byte lengths (avcC and hvcC begin with version 1), not by start codes."""
    return extradata is not None and extradata[:1] == b"\x01"


def picture_parameters(codec: str, packet: memoryview, *, lengths: bool) -> bytes:
    """Bytes that stay the same between key frames as long as the picture's size does; empty where nothing is known."""
    head = bytes(packet[:_HEAD])
    if codec in ("h264", "hevc"):
        return _sequence_sets(_units(head, lengths=lengths), hevc=codec == "hevc")
    if codec == "vp8":
        return head[6:10]  # RFC 6386, 9.1: width and height of a key frame
    if codec == "vp9":
        return _vp9_size(head)
    if codec in ("mpeg1video", "mpeg2video"):
        at = head.find(b"\x00\x00\x01\xb3")
        return head[at + 4 : at + 7] if at >= 0 else b""
    return b""


def _vp9_size(head: bytes) -> bytes:
    """Colour and size out of a VP9 key frame of profile 0 or 2 (VP9 bitstream specification, 6.2)."""
    if len(head) < 10 or head[1:4] != b"\x49\x83\x42" or head[0] & 0x20:
        return b""
    # After the sync code: a bit of depth in profile 2, three of colour space, one of range, 16 of width, 16 of height.
    used = 37 if head[0] & 0x10 else 36
    return (int.from_bytes(head[4:9], "big") >> (40 - used)).to_bytes(5, "big")


def _sequence_sets(units: list[bytes], *, hevc: bool) -> bytes:
    """The sequence parameter sets (H.264: type 7, HEVC: type 33) that stand before the first slice."""
    sets = b""
    for unit in units:
        kind = (unit[0] >> 1) & 0x3F if hevc else unit[0] & 0x1F
        if kind == (33 if hevc else 7):
            sets += unit
        elif kind < 32 if hevc else 1 <= kind <= 5:
            break
    return sets


def _units(head: bytes, *, lengths: bool) -> list[bytes]:
    if not lengths:
        return [unit for unit in _START_CODE.split(head) if unit]
    units, at = [], 0
    while at + 4 < len(head):
        size = int.from_bytes(head[at : at + 4], "big")
        if size == 0:
            break
        units.append(head[at + 4 : at + 4 + size])
        at += 4 + size
    return units


def is_hidden(codec: str, packet: memoryview) -> bool:
    """Whether the packet's frame is for reference only (VP8, RFC 6386, 9.1: bit 4 is show_frame)."""
    return codec == "vp8" and len(packet) > 0 and not packet[0] & 0x10


def is_packed(codec: str, packet: memoryview) -> bool:
    """Whether an MPEG-4 stream says that packets hold more than one frame, so that counting packets is not enough."""
    return codec == "mpeg4" and _PACKED.search(bytes(packet[:_HEAD])) is not None
