"""The HunyuanVideo VAE: a causal 3-D autoencoder with a Gaussian posterior.

Kong et al. 2024 (arXiv:2412.03603, section 4.1). Shapes: B batch, C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from osora_cli.config.models.dc_ae import TileAxis
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig, check_clip, compression, latent_size, tile_axes
from osora_cli.model.dc_ae.tiling import Coder, Cut, Read, joined, reader, tile_space
from osora_cli.model.hunyuan_vae.coder import Decoder, Encoder, unrounded
from osora_cli.model.hunyuan_vae.posterior import DiagonalGaussian
from osora_cli.model.hunyuan_vae.tiling import tile_time_causal


class HunyuanVae(nn.Module):
    """Causal video autoencoder over pixels in [-1, 1].

    Clips [B, 3, T, H, W] of any size give latents [B, latent_channels, (T-1)//time + 1, (H-1)//space + 1,
    (W-1)//space + 1], and these give 1 + time * (t-1) frames of space * h x space * w px. So a clip comes back in its
    own size when T is one more than a multiple of `time_compression_ratio` and H and W are multiples of
    `spatial_compression_ratio`; `forward` refuses others. Latents are `scale_factor * (z - shift_factor)`.
    """

    is_causal = True

    def __init__(self, config: HunyuanVaeConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or HunyuanVaeConfig()
        self.time_compression_ratio, self.spatial_compression_ratio = compression(config)
        self.in_channels = config.in_channels
        self.latent_channels = config.latent_channels
        self.time_tiles, self.space_tiles = tile_axes(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)

    def reset_parameters(self, seed: int) -> None:
        """PyTorch's default values: uniform to 1/sqrt(fan-in), norms at 1 and 0.

        Each tensor is drawn on the CPU in fp32 from a generator of its own, seeded by `seed` and the tensor's key.
        """
        modules = dict(self.named_modules())
        with torch.no_grad():
            for key, value in self.named_parameters():
                owner, _, leaf = key.rpartition(".")
                module = modules[owner]
                if isinstance(module, nn.GroupNorm):
                    value.fill_(1.0 if leaf == "weight" else 0.0)
                    continue
                weight = module.weight
                assert isinstance(weight, Tensor)
                bound = 1 / math.sqrt(weight[0].numel())
                # PyTorch's CPU generator looks at the low 32 bits of a seed only, so both go into them.
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
                drawn = torch.empty(value.shape, dtype=torch.float32)
                value.copy_(drawn.uniform_(-bound, bound, generator=generator))

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a clip of any size."""
        return latent_size(self.config, frames, height, width)

    def posterior(self, x_BCTHW: Tensor) -> DiagonalGaussian:
        """Distribution of the latents, before scale and shift; in tiles where the config says so."""
        return DiagonalGaussian.from_moments(
            self._by_sample(lambda x: joined(list(self._moment_parts(reader(x), x.shape[2]))), x_BCTHW)
        )

    def encode(
        self, x_BCTHW: Tensor, *, sample_posterior: bool = True, generator: torch.Generator | None = None
    ) -> Tensor:
        """Latents: a draw from the posterior or its mode, shifted and scaled.

        Args:
            generator: of the draw; None: PyTorch's global one.
        """
        return self.latents_of(self.posterior(x_BCTHW), sample_posterior=sample_posterior, generator=generator)

    def latents_of(
        self, posterior: DiagonalGaussian, *, sample_posterior: bool = True, generator: torch.Generator | None = None
    ) -> Tensor:
        """A draw from a posterior or its mode, shifted and scaled."""
        z_BCTHW = posterior.sample(generator) if sample_posterior else posterior.mode()
        return (z_BCTHW - self.config.shift_factor) * self.config.scale_factor

    def encode_parts(self, read: Read, frames: int) -> Iterator[Tensor]:
        """Latents at the posterior's mode of a clip of `frames` frames, in parts along time, one for each tile.

        Args:
            read: gives frames start .. end of the clip when they are due; those in two tiles come twice.
        """
        for moments in self._moment_parts(read, frames):
            yield self.latents_of(DiagonalGaussian.from_moments(moments), sample_posterior=False)

    def decode(self, z_BCTHW: Tensor) -> Tensor:
        """Clips of latents, not clamped; in tiles where the config says so."""
        return self._by_sample(lambda z: joined(list(self.decode_parts(z))), z_BCTHW)

    def decode_parts(self, z_BCTHW: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, in parts along time, one for each temporal tile."""
        z_BCTHW = z_BCTHW.to(self.get_first_layer().dtype) / self.config.scale_factor + self.config.shift_factor
        return self._in_tiles(self._pixels, reader(z_BCTHW), z_BCTHW.shape[2], Cut.decoding, unit=1)

    def forward(
        self, x_BCTHW: Tensor, *, sample_posterior: bool = True, generator: torch.Generator | None = None
    ) -> tuple[Tensor, DiagonalGaussian, Tensor]:
        """Reconstruction in the dtype of x, posterior and latents.

        Raises:
            ConfigError: the clip would not come back in its own size.
        """
        check_clip(self.config, *x_BCTHW.shape[2:])
        posterior = self.posterior(x_BCTHW)
        z_BCTHW = self.latents_of(posterior, sample_posterior=sample_posterior, generator=generator)
        return self.decode(z_BCTHW).to(x_BCTHW.dtype), posterior, z_BCTHW

    def get_first_layer(self) -> Tensor:
        """Weight of the first convolution; its dtype is the model's."""
        return self.encoder.conv_in.conv.weight

    def get_last_layer(self) -> Tensor:
        """Weight of the last convolution, for the adaptive weight of the adversarial loss."""
        return self.decoder.conv_out.conv.weight

    def enable_grad_checkpoint(self, enabled: bool = True) -> None:
        """Recompute activations in the backward pass: each resnet, re-sampler, middle block and tail norm."""
        self.encoder.grad_checkpoint = self.decoder.grad_checkpoint = enabled

    def _moment_parts(self, read: Read, frames: int) -> Iterator[Tensor]:
        return self._in_tiles(self._moments, read, frames, Cut.encoding, unit=self.time_compression_ratio)

    def _moments(self, x_BCTHW: Tensor) -> Tensor:
        h_BMTHW = self.encoder(x_BCTHW.to(self.get_first_layer().dtype))
        with unrounded(h_BMTHW, self.quant_conv.weight):
            return self.quant_conv(h_BMTHW)

    def _pixels(self, z_BCTHW: Tensor) -> Tensor:
        with unrounded(z_BCTHW, self.post_quant_conv.weight):
            z_BCTHW = self.post_quant_conv(z_BCTHW)
        return self.decoder(z_BCTHW)

    def _by_sample(self, coder: Coder, x_BCTHW: Tensor) -> Tensor:
        if not self.config.use_slicing or len(x_BCTHW) == 1:
            return coder(x_BCTHW)
        return torch.cat([coder(sample) for sample in torch.split(x_BCTHW, 1)])

    def _in_tiles(
        self, coder: Coder, read: Read, frames: int, cut_of: Callable[[TileAxis], Cut], unit: int
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
                yield from tile_time_causal(over_space, read, frames, cut, unit)
                return
        yield over_space(read(0, frames))
