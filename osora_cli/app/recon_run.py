"""The work of a reconstruction: clips are read, cut into pieces, coded in batches, and their parts put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from osora_cli.app.picture import ShownClip
from osora_cli.app.recon_input import ClipPlan, LeftOut, reason_of
from osora_cli.app.recon_output import ClipScore, ClipSink
from osora_cli.data.media import MediaError
from osora_cli.data.transforms import normalize
from osora_cli.errors import DataError, RunError, SetupError, UsageError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.padding import reconstruct_any_size
from osora_cli.model.perceptual import LPIPS

SHOWN_CLIPS = 4
_READ_BYTES = 256 * 2**20  # of decoded frames held at a time
_PAIR_PIXELS = 2**23  # of a batch, over all frames, up to which pieces are coded in pairs on a CPU

# Called with the clips done, the clips in all, and the clip that was just finished.
ProgressCall = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Piece:
    """Frames of a clip that are coded together: uint8 `[T, 3, H, W]`; the first `skip` have been coded before."""

    sink: ClipSink
    frames: torch.Tensor
    skip: int


@dataclass
class Runner:
    """Codes clips, pieces of one shape in batches.

    Attributes:
        model: the autoencoder, in its dtype on `device`.
        folder: the output folder, with orig/ and recn/ in it.
        chunk: frames of a piece; None: clips go to the net whole.
        batch_size: pieces in a batch.
        total: clips that will come, for `progress`.
        left_out: clips that fail are added here.
        lpips: LPIPS in fp32 on `device`; None: clips get no LPIPS.
        scores: of the clips that are finished.
        shown: frames of the first clips.
    """

    model: DcAe
    folder: Path
    device: torch.device
    chunk: int | None
    batch_size: int
    total: int
    left_out: list[LeftOut]
    progress: ProgressCall | None = None
    lpips: LPIPS | None = None
    scores: list[ClipScore] = field(default_factory=list)
    shown: list[ShownClip] = field(default_factory=list)
    _waiting: list[Piece] = field(default_factory=list)
    _open: list[ClipSink] = field(default_factory=list)

    def run(self, plans: Iterable[ClipPlan]) -> None:
        """Reconstruct all clips. Those that cannot be read are left out; any other error ends the run.

        Raises:
            UsageError: a clip's video would overwrite a clip of the input.
            SetupError: the output folder cannot be written.
            RunError: the GPU has too little memory.
        """
        try:
            for plan in plans:
                self._clip(plan)
            self._code()
        except (OSError, MediaError) as error:  # those of reading are dealt with clip by clip
            reason = error.reason if isinstance(error, MediaError) else error.strerror or str(error)
            raise SetupError(
                f"cannot write to `{self.folder}`: {reason}",
                where="save_dir",
                hint="choose another folder with `--save-dir DIR`, or make room there",
            ) from error
        finally:
            for sink in self._open:
                sink.abort()

    def _clip(self, plan: ClipPlan) -> None:
        check_targets(self.folder, plan)
        sink = ClipSink(plan, self.folder, len(self.scores) + len(self._open) < SHOWN_CLIPS, self.lpips)
        self._open.append(sink)
        parts = pieces(plan, self.chunk)
        while True:
            try:
                frames, skip = next(parts, (None, 0))
            except (DataError, OSError) as error:  # of reading: what writing raises is not this clip's fault
                self._give_up(sink, error)
                return
            if frames is None:
                return
            self._add(Piece(sink, frames, skip))

    def _give_up(self, sink: ClipSink, error: DataError | OSError) -> None:
        self._waiting = [piece for piece in self._waiting if piece.sink is not sink]
        self._open.remove(sink)
        sink.abort()
        reason = reason_of(error) if isinstance(error, DataError) else str(error)
        self.left_out.append(LeftOut(sink.plan.row, sink.plan.path, reason))

    def _add(self, piece: Piece) -> None:
        if self._waiting and self._waiting[0].frames.shape != piece.frames.shape:
            self._code()
        self._waiting.append(piece)
        if len(self._waiting) >= self._room(piece):
            self._code()

    def _room(self, piece: Piece) -> int:
        """Pieces in a batch. On a CPU two are faster than one by far (see `_forward`), where memory allows."""
        frames, _, height, width = piece.frames.shape
        pair = self.device.type == "cpu" and 2 * frames * height * width <= _PAIR_PIXELS
        return max(self.batch_size, 2 if pair else 1)

    def _code(self) -> None:
        """Code the pieces that wait, and give each clip its part."""
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        rebuilt, latent_shape = self._forward(torch.stack([piece.frames for piece in batch]), self._room(batch[0]))
        for piece, video in zip(batch, rebuilt, strict=True):
            sink = piece.sink
            sink.add(piece.frames, video.transpose(0, 1), latent_shape, piece.skip)
            if sink.done == len(sink.plan):
                self._finish(sink)

    def _finish(self, sink: ClipSink) -> None:
        self.scores.append(sink.finish())
        self._open.remove(sink)
        if sink.picture is not None:
            self.shown.append(sink.picture)
        if self.progress is not None:
            self.progress(len(self.scores), self.total, sink.plan.path)

    @torch.inference_mode()
    def _forward(self, frames: torch.Tensor, room: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """uint8 `[B, T, 3, H, W]` -> float `[B, 3, T, H, W]`, about [-1, 1], and the shape of one latent."""
        video = normalize(frames.to(self.device, non_blocking=True).transpose(1, 2))
        # torch's fp32 conv3d for a batch of one is several times slower on a CPU than for two: the clip goes twice.
        alone = len(video) == 1 and room > 1 and self.device.type == "cpu"
        try:
            rebuilt, latents = reconstruct_any_size(self.model, torch.cat([video, video]) if alone else video)
        except torch.cuda.OutOfMemoryError as error:
            _, _, count, height, width = video.shape
            raise RunError(
                f"the GPU has too little memory for {len(video)} x {count} frames of {width}x{height} px",
                hint="--model.use-spatial-tiling, a smaller `bucket_config`, or `--batch-size 1`",
            ) from error
        return rebuilt[: len(video)], tuple(latents.shape[1:])


def pieces(plan: ClipPlan, chunk: int | None) -> Iterator[tuple[torch.Tensor, int]]:
    """The pieces of a clip: frames uint8 `[T, 3, H, W]`, and how many of them belong to the piece before.

    All have `chunk` frames where the clip has as many: the last begins earlier rather than being shorter.
    """
    spans = cut(len(plan), chunk or len(plan))
    height, width = plan.size
    # Reading several pieces at once saves decoding from the same key frame for each of them.
    longest = spans[0][1]
    at_once = 1 if plan.resized else max(1, _READ_BYTES // (longest * height * width * 3))
    for first in range(0, len(spans), at_once):
        group = spans[first : first + at_once]
        begin = group[0][0]
        frames = plan.read(begin, group[-1][1])
        for start, stop, skip in group:
            yield frames[start - begin : stop - begin], skip


def cut(length: int, chunk: int) -> list[tuple[int, int, int]]:
    """(start, stop, frames shared with the piece before) of each piece of `length` frames."""
    if length <= chunk:
        return [(0, length, 0)]
    starts = [min(start, length - chunk) for start in range(0, length, chunk)]
    return [(start, start + chunk, number * chunk - start) for number, start in enumerate(starts)]


def check_targets(folder: Path, plan: ClipPlan) -> None:
    """No output may stand where an input is. Raises UsageError."""
    if plan.file.resolve().parent in (folder.resolve() / "orig", folder.resolve() / "recn"):
        raise UsageError(
            f"the clip `{plan.path}` is in the folder that the reconstruction is written to",
            where="save_dir",
            hint="--save-dir another folder",
        )
