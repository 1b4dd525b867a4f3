"""Whether clips are decoded right here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np

from osora_cli.app.doctor.finding import Finding
from osora_cli.data.media import probe, read_frames, write_video

# What clips of the usual data sets are coded in.
CODECS = ("h264", "hevc", "vp9", "av1", "mpeg4")


def decoder() -> Iterator[Finding]:
    """A made clip, written without loss and read back; and the codecs that the decoder has."""
    frames = made_clip()
    with tempfile.TemporaryDirectory(prefix="osora-doctor-") as folder:
        path = Path(folder) / "clip.mkv"
        write_video(path, frames, 25, lossless=True)
        told = probe(path).num_frames
        order = [7, 0, 3, 3, len(frames) - 1]
        read = read_frames(path, order)
    right = told == len(frames) and np.array_equal(read, frames[order])
    versions = {"av": av.__version__, "ffmpeg": av.ffmpeg_version_info}
    yield Finding(
        "decoder",
        "ok" if right else "fail",
        f"PyAV {av.__version__} with FFmpeg {av.ffmpeg_version_info}: a made clip comes back "
        + ("bit for bit" if right else f"changed ({told} of {len(frames)} frames)"),
        None if right else "pip install --force-reinstall av",
        versions,
    )
    missing = [name for name in CODECS if not _can_decode(name)]
    yield Finding(
        "codecs",
        "warn" if missing else "ok",
        f"no decoder for {', '.join(missing)}" if missing else ", ".join(CODECS),
        "pip install av from a wheel, which brings them all" if missing else None,
        {"missing": missing},
    )


def made_clip(frames: int = 24, height: int = 48, width: int = 64) -> np.ndarray:
    """uint8 [T, H, W, 3]: a pattern in which every frame, row and column differs."""
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    return np.stack([(x * 3 + t * 5) % 256, (y * 4 + t * 7) % 256, (x + y + t * 11) % 256], axis=-1).astype(np.uint8)


def _can_decode(name: str) -> bool:
    try:
        return bool(av.Codec(name, "r"))
    except ValueError:  # UnknownCodecError is one
        return False
