"""The MMDiT: a rectified-flow transformer over the tokens of a video latent and its text.

Esser et al. 2024 (arXiv:2403.03206), in the form of FLUX.1.

Shapes: B batch, N image tokens, L text tokens, F features of an image token, C width of a text token, P width of the
pooled text vector, E hidden width, A = 3 axes of a position.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from osora_cli.config.models.flux import FluxConfig
from osora_cli.model.mmdit.attention import Attention, RMSNorm, full_attention
from osora_cli.model.mmdit.blocks import Block, DoubleStreamBlock, LastLayer, SingleStreamBlock
from osora_cli.model.mmdit.convert import Rows, Shape, convert_rope, qkv_rows
from osora_cli.model.mmdit.embed import MLPEmbedder, timestep_embedding
from osora_cli.model.mmdit.host_buffer import HostBuffer
from osora_cli.model.mmdit.rope import RopeTable, rope_table

TIME_DIM = 256  # features of the sinusoids of timestep and guidance


class MMDiT(nn.Module):
    """Predicts the velocity of packed latents from text, a pooled text vector and the time.

    Attributes:
        config: what the model was built from.
        attend: how queries meet keys. Everything else works token by token, so an engine that splits the tokens over
            ranks replaces this and splits what goes into `run_blocks`.
        optional_keys: keys that weights may lack without harm: a condition embedding starts at zero, so weights
            trained without one can be extended with it.
    """

    optional_keys = frozenset({"cond_in.weight", "cond_in.bias"})

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        self.attend: Attention = full_attention
        width = config.hidden_size
        # Creation order is the order of the keys in files and of the parameters in optimizer states.
        self.img_in = nn.Linear(config.in_channels, width)
        self.time_in = MLPEmbedder(TIME_DIM, width)
        self.vector_in = MLPEmbedder(config.vec_in_dim, width)
        if config.guidance_embed:
            self.guidance_in = MLPEmbedder(TIME_DIM, width)
        if config.cond_embed:
            self.cond_in = nn.Linear(config.cond_channels, width)
        self.txt_in = nn.Linear(config.context_in_dim, width)
        heads, mlp_dim, fused = config.num_heads, config.mlp_dim, config.fused_qkv
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(width, heads, mlp_dim, qkv_bias=config.qkv_bias, fused_qkv=fused)
            for _ in range(config.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(width, heads, mlp_dim, fused_qkv=fused) for _ in range(config.depth_single_blocks)
        )
        self.final_layer = LastLayer(width, config.in_channels)
        self._zero_condition()

    def reset_parameters(self, seed: int) -> None:
        """Every Linear uniform within 1 / sqrt(inputs), as PyTorch has it, norm scales 1, the condition embedding 0.

        Nothing else starts at zero, neither modulations nor the last layer. Each tensor is drawn on
        the CPU in fp32 from a generator of its own, seeded by `seed` and the tensor's key: the values depend neither
        on the device nor on what else is drawn. Also gives values to a model whose storage was made after a meta build.
        """
        with torch.no_grad():
            for name, module in self.named_modules():
                if isinstance(module, RMSNorm):
                    module.scale.fill_(1)
                if not isinstance(module, nn.Linear):
                    continue
                bound = module.in_features**-0.5
                for leaf, value in module.named_parameters(recurse=False):
                    key = f"{name}.{leaf}"
                    # Of a seed, the CPU generator takes 32 bits: both go in by way of the checksum.
                    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
                    draw = torch.empty(value.shape, dtype=torch.float32)
                    value.copy_(draw.uniform_(-bound, bound, generator=generator))
            self._zero_condition()

    def _zero_condition(self) -> None:
        if self.config.cond_embed:
            nn.init.zeros_(self.cond_in.weight)
            nn.init.zeros_(self.cond_in.bias)

    def stored_rows(self, shapes: Mapping[str, Shape]) -> dict[str, list[Rows]]:
        """Which rows of stored tensors make this model's q, k and v, where they are stored fused and here split.

        Asked by who loads weights, before keys are compared; and the other way round (convert.py).
        """
        return qkv_rows(shapes, self.config)

    def settle_pretrained(self) -> None:
        """Bring the weights of `from_pretrained`, just loaded, from `pretrained_rope` to the model's rotary layout."""
        source, own = self.config.pretrained_rope, self.config.rope_layout
        if source is not None and source != own:
            with torch.no_grad():
                self.load_state_dict(convert_rope(self.state_dict(), self.config, source, own))

    def enable_grad_checkpoint(self, enabled: bool = True, buffer: HostBuffer | None = None) -> None:
        """Recompute block activations in the backward pass; which blocks, `grad_ckpt_settings` says (null: all).

        Args:
            buffer: host memory that keeps the blocks' inputs until then; None: they stay where they are.
        """
        settings = self.config.grad_ckpt_settings or (self.config.depth, self.config.depth_single_blocks)
        for blocks, count in zip((self.double_blocks, self.single_blocks), settings, strict=True):
            for index, block in enumerate(blocks):
                assert isinstance(block, Block)
                block.recompute = enabled and index < count
                block.buffer = buffer

    def forward(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y_vec: Tensor,
        cond: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Velocity `[B, N, F]` of noisy tokens.

        Args:
            img: packed latents `[B, N, F]`.
            img_ids: their positions (frame, row, column) `[B, N, 3]`, integers or fp32.
            txt: text tokens `[B, L, C]`; padding is not masked.
            txt_ids: their positions `[B, L, 3]`, all zero.
            timesteps: time of each sample in [0, 1], `[B]`: 0 is data, 1 is noise.
            y_vec: pooled text vector `[B, P]`.
            cond: packed condition `[B, N, F + p * p]`, needed with `cond_embed` and refused without it.
            guidance: guidance strength `[B]`, needed with `guidance_embed` and ignored without it.

        Raises:
            ValueError: inputs that the model's options do not fit.
        """
        self._check(img, txt, cond, guidance)
        # Casts are for models whose parameters are in half precision; under autocast the parameters are fp32.
        dtype = self.img_in.weight.dtype
        img_BNE = self.img_in(img.to(dtype))
        if cond is not None:
            img_BNE = img_BNE + self.cond_in(cond.to(dtype))
        txt_BLE = self.txt_in(txt.to(dtype))
        vec_BE = self.condition_vector(timesteps, y_vec, guidance)
        rope = self.rope(txt_ids, img_ids)
        img_BNE = self.run_blocks(img_BNE, txt_BLE, vec_BE, rope)
        # A tensor of its own: a Linear returns a view, and an in-place operation on a view of what a wrapped model
        # returns would lose the hooks that FSDP2 puts on it.
        return self.final_layer(img_BNE, vec_BE).clone()

    def condition_vector(self, timesteps_B: Tensor, y_vec_BP: Tensor, guidance_B: Tensor | None = None) -> Tensor:
        """What modulates all tokens of a sample: time, guidance if embedded, and pooled text, `[B, E]`."""
        dtype = self.time_in.in_layer.weight.dtype
        # The sinusoids in fp32, whatever the dtype of the time, and rounded to the compute dtype afterwards.
        vec_BE = self.time_in(timestep_embedding(timesteps_B.float(), TIME_DIM).to(dtype))
        if self.config.guidance_embed and guidance_B is not None:
            vec_BE = vec_BE + self.guidance_in(timestep_embedding(guidance_B.float(), TIME_DIM).to(dtype))
        return vec_BE + self.vector_in(y_vec_BP.to(dtype))

    def rope(self, txt_ids_BLA: Tensor, img_ids_BNA: Tensor) -> RopeTable:
        """Rotation table of the joined sequence, text first."""
        ids_BSA = torch.cat([txt_ids_BLA, img_ids_BNA], dim=1)
        interleaved = not self.config.use_liger_rope
        return rope_table(ids_BSA, self.config.axes_dim, self.config.theta, interleaved=interleaved)

    def run_blocks(self, img_BNE: Tensor, txt_BLE: Tensor, vec_BE: Tensor, rope: RopeTable) -> Tensor:
        """All blocks, from embedded tokens to the image tokens before the last layer.

        Image and text may each be a rank's part of their tokens, if `rope` holds the rows of just these tokens, text
        first, and `attend` reaches the other ranks' keys.
        """
        for block in self.double_blocks:
            img_BNE, txt_BLE = block(img_BNE, txt_BLE, vec_BE, rope, self.attend)
        x_BSE = torch.cat([txt_BLE, img_BNE], dim=1)
        for block in self.single_blocks:
            x_BSE = block(x_BSE, vec_BE, rope, self.attend)
        return x_BSE[:, txt_BLE.shape[1] :]

    def _check(self, img: Tensor, txt: Tensor, cond: Tensor | None, guidance: Tensor | None) -> None:
        for name, value in (("img", img), ("txt", txt)):
            if value.ndim != 3:
                raise ValueError(f"{name} has {value.ndim} dimensions, 3 are needed: [batch, tokens, features]")
        if self.config.cond_embed and cond is None:
            raise ValueError("cond_embed is True, but no cond was given")
        if cond is not None and not self.config.cond_embed:
            raise ValueError("cond was given, but cond_embed is False: the model would not see it")
        if self.config.guidance_embed and guidance is None:
            raise ValueError("guidance_embed is True, but no guidance was given")
