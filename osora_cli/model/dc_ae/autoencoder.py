"""The Video DC-AE: a deep-compression autoencoder for clips, without posterior.

Architecture: Chen et al. 2024 (arXiv:2410.10733), in the video form of Open-Sora 2.0. Shape suffixes: B clip,
C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from osora_cli.config.models.dc_ae import DcAeConfig, TileAxis, check_size, plan, tile_axes
from osora_cli.errors import ConfigError
from osora_cli.model.dc_ae.coder import Decoder, Encoder
from osora_cli.model.dc_ae.tiling import Coder, Cut, Read, joined, reader, tile_space, tile_time

INIT_STD = 0.02


class DcAe(nn.Module):
    """Video autoencoder over pixels in [-1, 1], batched throughout.

    Takes clips [B, C, T, H, W] with T = 1 or T a multiple of `time_compression_ratio`, H and W multiples of
    `spatial_compression_ratio`; latents are [B, latent_channels, T / time, H / space, W / space]. A latent of one
    frame always decodes to one frame, so `forward` also refuses clips that would come back shorter. Pixels out are
    not clamped. padding.py brings clips of any size in and out.

    Raises:
        ConfigError: from the constructor where the config is not consistent, from the calls where a clip's size is
            not one that the net takes.
    """

    is_causal = False

    def __init__(self, config: DcAeConfig) -> None:
        super().__init__()
        made = plan(config)
        self.config = config
        self.time_compression_ratio = made.time_compression
        self.spatial_compression_ratio = made.spatial_compression
        self.in_channels = made.in_channels
        self.latent_channels = made.latent_channels
        self.scaling_factor = None if config.is_training else config.scaling_factor
        self.time_tiles, self.space_tiles = tile_axes(config)
        self.encoder = Encoder(made.encoder, made.in_channels, made.latent_channels)
        self.decoder = Decoder(made.decoder, made.in_channels, made.latent_channels)

    def reset_parameters(self, seed: int) -> None:
        """Weights, those of the norms included, from N(0, 0.02); biases 0.

        With a norm's scale about 0 every block starts near the identity, which is what training from scratch in
        Open-Sora starts from. (Its cut at absolute +-2 is 100 standard deviations away.) Each tensor is drawn on the
        CPU in fp32 from a generator of its own, seeded by `seed` and the tensor's key: the values depend neither on
        the device nor on what else is drawn.
        """
        with torch.no_grad():
            for key, value in self.named_parameters():
                if key.endswith("bias"):
                    value.zero_()
                    continue
                # The CPU's generator looks at 32 bits of a seed only: the key's hash has to take in `seed`.
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
                value.copy_(torch.empty(value.shape, dtype=torch.float32).normal_(0, INIT_STD, generator=generator))

    def encode(self, x_BCTHW: Tensor) -> Tensor:
        """Latents of clips, divided by `scaling_factor` if there is one; in tiles where the config says so."""
        self._check_encodable(*x_BCTHW.shape[2:])
        return joined(list(self.encode_parts(reader(x_BCTHW), x_BCTHW.shape[2])))

    def decode(self, z_BCTHW: Tensor) -> Tensor:
        """Clips of latents (the inverse of `encode`); in tiles where the config says so."""
        return joined(list(self.decode_parts(z_BCTHW)))

    def encode_parts(self, read: Read, frames: int) -> Iterator[Tensor]:
        """What `encode` gives for a clip of `frames` frames, in parts along time, one for each temporal tile.

        Args:
            read: gives frames start .. end of the clip when they are due; those in two tiles come twice.
        """
        return self._in_tiles(self._encode_plain, read, frames, Cut.encoding, least_frames=1)

    def decode_parts(self, z_BCTHW: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, in parts along time."""
        # A tile of one latent frame would be decoded as an image and lose frames.
        least = 1 if self.time_compression_ratio == 1 else 2
        return self._in_tiles(self._decode_plain, reader(z_BCTHW), z_BCTHW.shape[2], Cut.decoding, least_frames=least)

    def forward(self, x_BCTHW: Tensor) -> tuple[Tensor, None, Tensor]:
        """Reconstruction in the dtype of x, None (there is no posterior), and the latents.

        Raises:
            ConfigError: the clip would not come back in its own size.
        """
        check_size(*x_BCTHW.shape[2:], time=self.time_compression_ratio, space=self.spatial_compression_ratio)
        z_BCTHW = self.encode(x_BCTHW.to(self.dtype))
        return self.decode(z_BCTHW).to(x_BCTHW.dtype), None, z_BCTHW

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; clips are cast to it."""
        return self.encoder.project_in.conv.weight.dtype

    def get_last_layer(self) -> Tensor:
        """Weight of the last convolution, for the adaptive weight of the adversarial loss."""
        return self.decoder.project_out.last_conv.weight

    def enable_grad_checkpoint(self, enabled: bool = True) -> None:
        """Recompute activations in the backward pass: each stage, the encoder's end, both ends of the decoder.

        Gradients by `torch.autograd.grad` work through it. With `disc_off_grad_ckpt` the decoder's end, which holds
        the last layer, is left out.
        """
        self.encoder.grad_checkpoint = self.decoder.grad_checkpoint = enabled
        self.decoder.keep_last = self.config.disc_off_grad_ckpt

    def _check_encodable(self, frames: int, height: int, width: int) -> None:
        """Frames that every halving of time finds even, or single: the divisors and the multiples of the ratio."""
        time = self.time_compression_ratio
        if frames < 1 or (frames % time and time % frames):
            raise ConfigError(
                f"a clip of `{frames}` frames cannot be encoded",
                allowed=f"frame counts that divide {time} or are multiples of it",
                hint="model/dc_ae/padding.py takes clips of any length",
            )
        check_size(1, height, width, time=time, space=self.spatial_compression_ratio)

    def _encode_plain(self, x_BCTHW: Tensor) -> Tensor:
        z_BCTHW = self.encoder(x_BCTHW.contiguous(memory_format=torch.channels_last_3d))
        return z_BCTHW if self.scaling_factor is None else z_BCTHW / self.scaling_factor

    def _decode_plain(self, z_BCTHW: Tensor) -> Tensor:
        if self.scaling_factor is not None:
            z_BCTHW = z_BCTHW * self.scaling_factor
        return self.decoder(z_BCTHW.contiguous(memory_format=torch.channels_last_3d))

    def _in_tiles(
        self, coder: Coder, read: Read, frames: int, cut_of: Callable[[TileAxis], Cut], least_frames: int
    ) -> Iterator[Tensor]:
        """`coder` at once, or over the tiles of space, within those of time, on axes longer than a tile."""

        def over_space(part_BCTHW: Tensor) -> Tensor:
            if self.space_tiles is None:
                return coder(part_BCTHW)
            cut = cut_of(self.space_tiles)
            return tile_space(coder, part_BCTHW, cut) if max(part_BCTHW.shape[3:]) > cut.length else coder(part_BCTHW)

        if self.time_tiles is not None:
            cut = cut_of(self.time_tiles)
            if frames > cut.length:
                yield from tile_time(over_space, read, frames, cut, least_frames)
                return
        yield over_space(read(0, frames))
