"""The autoencoder of a reconstruction: built, with its weights, and through it clips of any length and size.

Shapes: B clips, C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from osora_cli.app.reconstruct.find import Found
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.errors import RunError
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.padding import pad_clip, padded_size
from osora_cli.model.dc_ae.tiling import joined, reader
from osora_cli.model.hunyuan_vae.autoencoder import HunyuanVae
from osora_cli.model.weights import load_weights
from osora_cli.tensors import TensorShard

ClipSize = tuple[int, int, int]
# Frames start .. end of a clip, uint8 `[T, 3, H, W]`.
ReadFrames = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Net:
    """A network with its weights, and which these are.

    Attributes:
        model: on `device`; the Video DC-AE in `dtype`, the Hunyuan VAE in fp32.
        dtype: of the computation.
        weights: the checkpoint's folder, the weights' file, or a name on the hub.
        step: the checkpoint's number of updates; None for a file.
        ema: whether they are the checkpoint's average.
    """

    model: DcAe | HunyuanVae
    device: torch.device
    dtype: torch.dtype
    weights: str
    step: int | None
    ema: bool

    @property
    def is_causal(self) -> bool:
        return isinstance(self.model, HunyuanVae)

    @property
    def ratios(self) -> tuple[int, int]:
        """Frames and pixels of a latent."""
        return self.model.time_compression_ratio, self.model.spatial_compression_ratio

    @property
    def weights_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def described(self) -> str:
        """Which weights these are, in words."""
        if self.step is None:
            return self.weights
        return f"{self.weights}, update {self.step}, " + (
            "averaged weights (EMA)" if self.ema else "the weights themselves"
        )

    def fitted(self, size: ClipSize) -> ClipSize:
        """The smallest clip that the net takes and gives back whole, and that holds this one."""
        time, space = self.ratios
        if not self.is_causal:
            return padded_size(*size, time=time, space=space)
        frames, height, width = (
            -(-(n - first) // step) * step + first
            for n, first, step in zip(size, (1, 0, 0), (time, space, space), strict=True)
        )
        return frames, height, width

    def latent_frames(self, frames: int) -> int:
        """Latent frames that the first `frames` frames of a clip are made from, rounded up."""
        time = self.ratios[0]
        return (frames - 1) // time + 1 if self.is_causal else -(-frames // time)

    def tiles_time(self, size: ClipSize) -> bool:
        """Whether the clip goes through in temporal tiles."""
        tiles = self.model.time_tiles
        return tiles is not None and self.fitted(size)[0] > tiles.latent * tiles.ratio + self.is_causal

    def rebuild(self, x_BCTHW: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Clips of one size, about [-1, 1], coded and decoded at once, in fp32; and the shape of one latent.

        They are padded by repetition to what the net takes, and cut back.
        """
        frames, height, width = x_BCTHW.shape[2:]
        padded = pad_clip(x_BCTHW, self.fitted((frames, height, width)))
        z_BCTHW = joined(list(self.encode(reader(padded), padded.shape[2])))
        y_BCTHW = joined(list(self.decode(z_BCTHW)))
        return y_BCTHW[:, :, :frames, :height, :width].float(), tuple(z_BCTHW.shape[1:])

    def encode(self, read: Callable[[int, int], Tensor], frames: int) -> Iterator[Tensor]:
        """Latents of a clip that fits, in parts along time; `read(start, end)` gives its frames `[B, 3, T, H, W]`."""
        own = (lambda start, end: read(start, end).to(self.model.dtype)) if isinstance(self.model, DcAe) else read
        return self._each(self.model.encode_parts(own, frames))

    def decode(self, z_BCTHW: Tensor) -> Iterator[Tensor]:
        """Clips of latents, in parts along time."""
        return self._each(self.model.decode_parts(z_BCTHW))

    def _each(self, parts: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            with torch.inference_mode(), self._precision():
                part = next(parts, None)
            if part is None:
                return
            yield part

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The Hunyuan VAE keeps fp32 weights, sums and norms: rounded to bf16 they cost decibels."""
        mixed = self.is_causal and self.dtype != torch.float32
        try:
            with torch.autocast(self.device.type, dtype=self.dtype if mixed else None, enabled=mixed):
                yield
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                "the GPU has too little memory for these clips",
                hint="--model.use-spatial-tiling, --model.use-temporal-tiling, a smaller `bucket_config`, "
                "or `--batch-size 1`",
            ) from error


def load_net(found: Found, *, use_ema: bool, device: torch.device, dtype: torch.dtype) -> Net:
    """Build the net and fill in its weights: the EMA's where the checkpoint has one and `use_ema`, else its own.

    Raises:
        CheckpointError: the weights are damaged, or of another model.
    """
    # Without `from_pretrained`: which weights these are is settled here, not by the builder.
    config = found.config.model_copy(update={"from_pretrained": None})
    model = build_model(config, device=device, dtype=dtype if config.type == "dc_ae" else torch.float32)
    assert isinstance(model, DcAe | HunyuanVae)
    model.eval().requires_grad_(False)
    if not found.is_checkpoint:
        load_weights(model, found.weights, found.config.strict_load)
        return Net(model, device, dtype, found.weights, None, False)
    checkpoint = CheckpointReader(Path(found.weights))
    ema = use_ema and "ema" in checkpoint.groups()
    tensors = dict(model.state_dict())
    # The average covers parameters; what it does not hold is the model's own.
    groups = ["model", "ema"] if ema and set(tensors) - set(checkpoint.tensors("ema")) else ["ema" if ema else "model"]
    for group in groups:
        held = checkpoint.tensors(group)
        shards = [TensorShard.whole(key, value) for key, value in tensors.items() if group == "model" or key in held]
        checkpoint.read_into(group, shards, cast=True)
    return Net(model, device, dtype, found.weights, checkpoint.counters.actual_update_step, ema)
