"""The work of a reconstruction: clips are read, coded in pieces or streamed in tiles, and their parts put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from osora_cli.app.picture import ShownClip
from osora_cli.app.reconstruct.clips import ClipPlan, LeftOut, reason_of
from osora_cli.app.reconstruct.net import Net
from osora_cli.app.reconstruct.output import ClipSink, Files
from osora_cli.app.reconstruct.scores import ClipScore
from osora_cli.data.media import MediaError
from osora_cli.data.transforms import normalize
from osora_cli.errors import DataError, SetupError, UsageError
from osora_cli.model.dc_ae.padding import pad_clip
from osora_cli.model.dc_ae.tiling import joined
from osora_cli.model.perceptual import LPIPS

SHOWN_CLIPS = 4  # in the picture
_READ_BYTES = 256 * 2**20  # of decoded frames held at a time

# Called with the clips done, the clips in all, the clip in work or just finished, and the share of it that is done.
ProgressCall = Callable[[int, int, str, float], None]
# Original uint8 `[T, 3, H, W]`, reconstruction `[T, 3, H, W]`, shape of the latent, frames that have no other latent.
Part = tuple[torch.Tensor, torch.Tensor, tuple[int, ...], int]
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Frames of a clip that are coded together: uint8 `[T, 3, H, W]`; the first `skip` have been coded before."""

    sink: ClipSink
    frames: torch.Tensor
    skip: int


@dataclass
class Runner:
    """Codes clips: long ones tile by tile where the net has temporal tiles, others in pieces, those of one shape in
    batches.

    Attributes:
        net: the autoencoder.
        files: which files are written.
        chunk: frames of a piece.
        batch_size: pieces in a batch.
        total: clips that will come, for `progress`.
        left_out: clips that fail are added here.
        lpips: LPIPS in fp32 on the net's device; None: clips get no LPIPS.
        scores: of the clips that are finished.
        shown: frames of the first clips, by row.
    """

    net: Net
    files: Files
    chunk: int
    batch_size: int
    total: int
    left_out: list[LeftOut]
    progress: ProgressCall | None = None
    lpips: LPIPS | None = None
    scores: list[ClipScore] = field(default_factory=list)
    shown: dict[int, ShownClip] = field(default_factory=dict)
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
                f"cannot write to `{self.files.folder}`: {reason}",
                where="save_dir",
                hint="choose another folder with `--save-dir DIR`, or make room there",
            ) from error
        finally:
            for sink in self._open:
                sink.abort()

    def _clip(self, plan: ClipPlan) -> None:
        check_targets(self.files, plan)
        sink = ClipSink(plan, self.files, self.net.ratios, len(self.shown) + len(self._open) < SHOWN_CLIPS, self.lpips)
        self._open.append(sink)
        if self.net.tiles_time((len(plan), *plan.size)):
            tell = lambda share: self._tell(sink, share)  # noqa: E731
            for original, rebuilt, latent_shape, lead in self._readable(sink, stream(self.net, plan, tell)):
                sink.add(original, rebuilt, latent_shape, 0, lead)
                self._added(sink)
            return
        for frames, skip in self._readable(sink, pieces(plan, self.chunk)):
            self._add(Piece(sink, frames, skip))

    def _readable(self, sink: ClipSink, parts: Iterator[T]) -> Iterator[T]:
        """The parts of a clip until one cannot be read: then the clip is given up."""
        while True:
            try:
                part = next(parts, None)
            except (DataError, OSError) as error:  # of reading: what writing raises is not this clip's fault
                self._give_up(sink, error)
                return
            if part is None:
                return
            yield part

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
        if len(self._waiting) >= self.batch_size:
            self._code()

    def _code(self) -> None:
        """Code the pieces that wait, and give each clip its part."""
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        frames = torch.stack([piece.frames for piece in batch]).to(self.net.device, non_blocking=True)
        rebuilt, latent_shape = self.net.rebuild(normalize(frames.transpose(1, 2)))
        for piece, video in zip(batch, rebuilt, strict=True):
            lead = int(self.net.is_causal)
            piece.sink.add(piece.frames, video.transpose(0, 1), latent_shape, piece.skip, lead)
            if piece.sink.done < len(piece.sink.plan):
                self._tell(piece.sink, piece.sink.done / len(piece.sink.plan))
            self._added(piece.sink)

    def _added(self, sink: ClipSink) -> None:
        """After a part: the clip may be complete."""
        if sink.done < len(sink.plan):
            return
        self.scores.append(sink.finish())
        self._open.remove(sink)
        if sink.picture is not None:
            self.shown[sink.plan.row] = sink.picture
        self._tell(sink, 1.0)

    def _tell(self, sink: ClipSink, share: float) -> None:
        if self.progress is not None:
            self.progress(len(self.scores), self.total, sink.plan.path, share)


def stream(net: Net, plan: ClipPlan, tell: Callable[[float], None]) -> Iterator[Part]:
    """A long clip through the net's temporal tiles: exactly what the net makes of it whole, in little memory.

    All latents come first (they are small), then the frames are read once more to stand beside their reconstructions.
    Padding is by repetition, as in `Net.rebuild`.

    Args:
        tell: called with the share of the work that is done.
    """
    length, (height, width) = len(plan), plan.size
    frames, *padded = net.fitted((length, height, width))

    def read(start: int, end: int) -> torch.Tensor:
        pixels = plan.read(min(start, length - 1), min(end, length)).to(net.device, non_blocking=True)
        return pad_clip(normalize(pixels.transpose(0, 1)[None]), (end - start, padded[0], padded[1]))

    latents, done = [], 0
    for latent in net.encode(read, frames):
        latents.append(latent)
        done += latent.shape[2]
        tell(done / net.latent_frames(frames) / 2)
    z_BCTHW = joined(latents)
    done = 0
    for video in net.decode(z_BCTHW):
        end = min(done + video.shape[2], length)
        rebuilt = video[0, :, : end - done, :height, :width].transpose(0, 1)
        own = net.latent_frames(done + video.shape[2]) - (net.latent_frames(done) if done else 0)
        latent_shape = (z_BCTHW.shape[1], own, *z_BCTHW.shape[3:])
        yield plan.read(done, end), rebuilt, latent_shape, int(net.is_causal and done == 0)
        done = end
        if done == length:
            return
        tell((1 + done / length) / 2)


def pieces(plan: ClipPlan, chunk: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The pieces of a clip: frames uint8 `[T, 3, H, W]`, and how many of them belong to the piece before.

    All have `chunk` frames where the clip has as many: the last begins earlier rather than being shorter.
    """
    spans = cut(len(plan), chunk)
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


def check_targets(files: Files, plan: ClipPlan) -> None:
    """No output may stand where an input is. Raises UsageError."""
    if plan.file.resolve().parent in {files.folder.resolve() / side for side in files.sides}:
        raise UsageError(
            f"the clip `{plan.path}` is in the folder that the reconstruction is written to",
            where="save_dir",
            hint="--save-dir another folder",
        )
