"""The losses of autoencoder training, in fp32, after taming-transformers (Esser et al. 2021, arXiv:2012.09841).

Shapes: B batch, C channels, T frames, H rows, W columns; N = B*T frames counted as images, M = C*H*W values a frame.

The likelihood term is a sum over C, H and W and a mean over frames, as in Open-Sora 2.0: values near 1e5 at 256 px are
right. Beside each sum stands its mean per value, which can be compared between sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv3d_weight

DiscriminatorLossType = Literal["hinge", "vanilla", "wgan-gp"]

# A perceptual distance: two batches of frames [N, C, H, W], the target first, to one value a frame [N, 1, 1, 1].
Perceptual = Callable[[Tensor, Tensor], Tensor]


class Posterior(Protocol):
    """What the KL term needs of a posterior."""

    def kl(self) -> Tensor:
        """Divergence from the standard normal, one value a sample: [B]."""
        ...


@dataclass(frozen=True)
class VaeLoss:
    """The parts of the autoencoder's loss: fp32 scalars.

    `total`, `nll` and `kl` carry the gradient; the others are detached, for the log.

    Attributes:
        total: nll + kl.
        nll: negative log-likelihood, summed over C, H, W, mean over frames.
        kl: weighted KL of the posterior, summed over C, T, H, W, mean over samples; 0 without a posterior.
        rec: absolute error, summed over C, H, W, mean over frames.
        perceptual: unweighted perceptual distance times C*H*W, mean over frames.
        rec_per_pixel: mean absolute error of a value.
        perceptual_mean: mean perceptual distance of a frame.
    """

    total: Tensor
    nll: Tensor
    kl: Tensor
    rec: Tensor
    perceptual: Tensor
    rec_per_pixel: Tensor
    perceptual_mean: Tensor


def fold_frames(video_BCTHW: Tensor) -> Tensor:
    """[B, C, T, H, W] to frames [B*T, C, H, W]."""
    return video_BCTHW.transpose(1, 2).flatten(0, 1)


def vae_loss(
    video: Tensor,
    recon: Tensor,
    *,
    perceptual_weight: float,
    kl_weight: float,
    perceptual: Perceptual | None = None,
    posterior: Posterior | None = None,
    logvar: float = 0.0,
) -> VaeLoss:
    """Loss of a reconstruction: L1 plus perceptual distance under a Laplace-like likelihood, plus KL.

    Args:
        video: the clip [B, C, T, H, W], about [-1, 1].
        recon: its reconstruction, of the same shape, any float dtype.
        perceptual_weight: weight of the perceptual distance, per value of the frame.
        kl_weight: weight of the KL term.
        perceptual: distance of frames, called with (target, reconstruction). None: the term is 0.
        posterior: of the latents; None for an autoencoder without one.
        logvar: constant log-variance of the likelihood.

    Raises:
        ValueError: the shapes differ, or a perceptual weight is given without a distance.
    """
    if video.shape != recon.shape:
        raise ValueError(f"the reconstruction is {list(recon.shape)}, the clip {list(video.shape)}")
    if perceptual is None and perceptual_weight != 0:
        raise ValueError(f"perceptual weight `{perceptual_weight}` needs a perceptual distance")
    frames_NCHW, recon_NCHW = fold_frames(video).float(), fold_frames(recon).float()
    num_frames, values = len(frames_NCHW), frames_NCHW[0].numel()

    rec = F.l1_loss(recon_NCHW, frames_NCHW, reduction="sum") / num_frames
    if perceptual is None:
        perceptual_mean = rec.new_zeros(())
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and perceptual_weight != 0):
            perceptual_mean = perceptual(frames_NCHW, recon_NCHW).float().sum() / num_frames
    nll = (rec + perceptual_weight * values * perceptual_mean) / exp(logvar) + values * logvar
    kl = rec.new_zeros(()) if posterior is None else kl_weight * posterior.kl().float().mean()
    return VaeLoss(
        total=nll + kl,
        nll=nll,
        kl=kl,
        rec=rec.detach(),
        perceptual=perceptual_mean.detach() * values,
        rec_per_pixel=rec.detach() / values,
        perceptual_mean=perceptual_mean.detach(),
    )


def loss_factor(update: int, start: int, factor: float | None) -> float:
    """Weight of an adversarial loss at an update: 0 before `start`, then `factor`. None is 0, the loss is off."""
    return float(factor) if factor is not None and update >= start else 0.0


def discriminator_loss(real: Tensor, fake: Tensor, kind: DiscriminatorLossType = "hinge") -> Tensor:
    """Loss of the discriminator from its logits, of any shape, for real and reconstructed clips.

    hinge: (mean relu(1 - real) + mean relu(1 + fake)) / 2; vanilla: (mean softplus(-real) + mean softplus(fake)) / 2;
    wgan-gp: (mean fake - mean real) / 2, without a gradient penalty, as in Open-Sora 2.0.
    """
    real, fake = real.float(), fake.float()
    if kind == "hinge":
        return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
    if kind == "vanilla":
        return 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())
    if kind == "wgan-gp":
        return 0.5 * (fake.mean() - real.mean())
    raise ValueError(f"discriminator loss `{kind}` is not one of hinge, vanilla, wgan-gp")


def generator_loss(fake: Tensor) -> Tensor:
    """Loss of the generator from the discriminator's logits for a reconstruction: -mean."""
    return -fake.float().mean()


def adaptive_weight(nll_norm: Tensor, generator_norm: Tensor, disc_weight: float, max_ratio: float = 1e4) -> Tensor:
    """Weight that brings the adversarial gradient at the last layer to the likelihood's size.

    arXiv:2012.09841, equation 7: clamp(nll_norm / (generator_norm + 1e-4), 0, max_ratio) * disc_weight, from the
    two L2 norms, in fp32 and detached.
    """
    ratio = nll_norm.detach().float() / (generator_norm.detach().float() + 1e-4)
    return ratio.clamp(0, max_ratio) * disc_weight


class LastConvRecorder:
    """Keeps the input of a model's last convolution during one forward, so that its weight-VJP can be had alone.

    Use as a context manager around the forward. Inputs of a recomputation (gradient checkpointing) come after the
    block and are not recorded. The convolution's parameter itself is not touched: it may be sharded.
    """

    def __init__(self, conv: nn.Conv3d) -> None:
        self.conv = conv
        self._input_BCTHW: Tensor | None = None
        self._handle: Any = None

    @classmethod
    def of(cls, model: nn.Module, weight: Tensor) -> LastConvRecorder:
        """Recorder of the Conv3d in `model` that owns `weight` (what `get_last_layer()` gives)."""
        for module in model.modules():
            if isinstance(module, nn.Conv3d) and module.weight is weight:
                return cls(module)
        raise ValueError("the last layer's weight belongs to no Conv3d of the model")

    def __enter__(self) -> LastConvRecorder:
        self._input_BCTHW = None
        self._handle = self.conv.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _keep(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._input_BCTHW = args[0].detach()

    def clear(self) -> None:
        """Let go of the recorded input."""
        self._input_BCTHW = None

    def weight_gradients(self, *output_gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients at the convolution's weight, one for each gradient at its output [B, Cout, T, H, W].

        The gradients are laid side by side as output channels, so the recorded input is read once. fp32.
        """
        if self._input_BCTHW is None:
            raise ValueError("nothing was recorded: run the forward inside the recorder")
        conv, input_BCTHW = self.conv, self._input_BCTHW
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError("the last layer is a plain convolution: one group, zero padding")
        if input_BCTHW.device.type == "cpu":  # its bf16 kernel is not right for all lengths, see model/conv.py
            input_BCTHW = input_BCTHW.float()
        count = len(output_gradients)
        grad_BCTHW = torch.cat(output_gradients, dim=1).to(input_BCTHW.dtype)
        shape = (count * conv.out_channels, conv.in_channels, *conv.kernel_size)
        weight_grad = conv3d_weight(
            input_BCTHW, shape, grad_BCTHW, stride=conv.stride, padding=conv.padding, dilation=conv.dilation
        )
        return weight_grad.float().chunk(count)


@dataclass(frozen=True)
class VaeGanLoss:
    """The autoencoder's loss with the adversarial term: fp32 scalars.

    Attributes:
        objective: to be differentiated; its value is vae.total + weight * factor * generator.
        vae: the parts without the adversarial term (detached but for `kl`).
        generator: -mean of the discriminator's logits.
        weight: adaptive weight times `disc_weight`; 1 when `disc_factor` is 0 or None.
        factor: 0 before the start, then `disc_factor`.
        nll_norm, generator_norm: L2 norms at the last layer (0 when `disc_factor` is 0 or None).
        logits_fake: mean logit of the reconstruction.
    """

    objective: Tensor
    vae: VaeLoss
    generator: Tensor
    weight: Tensor
    factor: float
    nll_norm: Tensor
    generator_norm: Tensor
    logits_fake: Tensor


class _KnownGradient(torch.autograd.Function):
    """A scalar whose gradient at `recon` has been worked out already."""

    @staticmethod
    def forward(ctx: Any, recon: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = recon.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_output).to(ctx.dtype), None, None


def vae_gan_loss(
    video: Tensor,
    recon: Tensor,
    recorder: LastConvRecorder,
    discriminator: Callable[[Tensor], Tensor],
    *,
    update: int,
    perceptual_weight: float,
    kl_weight: float,
    perceptual: Perceptual | None = None,
    posterior: Posterior | None = None,
    logvar: float = 0.0,
    disc_weight: float = 0.5,
    max_ratio: float = 1e4,
    gen_start: int = 0,
    disc_factor: float | None = 1.0,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> VaeGanLoss:
    """`vae_loss` plus the adversarial term with its adaptive weight, in a form that is as exact and cheaper.

    With a and b the gradients of likelihood and adversarial loss at the reconstruction, the norms at the last layer
    are those of the convolution's weight-VJP of a and b, and one backward with a + weight * factor * b trains the
    model: the perceptual net and the discriminator are each passed backward once, the decoder's trunk once.

    Args:
        video, recon, perceptual_weight, kl_weight, perceptual, posterior, logvar: as in `vae_loss`. `recon` is the
            output of the recorded convolution, uncut.
        recorder: held the input of the last convolution in the forward that made `recon`. Cleared here.
        discriminator: clips [B, C, T, H, W] to logits. Its parameters gather no gradient.
        update: number of the optimizer update, counted from 0.
        disc_weight: share of the adversarial gradient against the likelihood's at the last layer.
        max_ratio: the ratio of the two norms counts up to this.
        gen_start: first update in which the term counts. Its weight is known before that.
        disc_factor: factor on the term from then on. 0 or None: the term is off.
        agree: makes the ranks' weights one (their mean). None: each rank has its own.
    """
    leaf_BCTHW = recon.detach().float().requires_grad_(True)
    with torch.enable_grad():
        parts = vae_loss(
            video, leaf_BCTHW, perceptual=perceptual, perceptual_weight=perceptual_weight, kl_weight=kl_weight,
            posterior=posterior, logvar=logvar,
        )  # fmt: skip
        (nll_grad,) = torch.autograd.grad(parts.nll, leaf_BCTHW)
        active = disc_factor is not None and disc_factor > 0
        with torch.set_grad_enabled(active):
            logits = discriminator(leaf_BCTHW)
            g = generator_loss(logits)

    factor = loss_factor(update, gen_start, disc_factor)
    if active:
        (generator_grad,) = torch.autograd.grad(g, leaf_BCTHW)
        norms = [w.norm() for w in recorder.weight_gradients(nll_grad, generator_grad)]
        weight = adaptive_weight(norms[0], norms[1], disc_weight, max_ratio)
        weight = weight if agree is None else agree(weight)
        gradient = nll_grad if factor == 0 else nll_grad + weight * factor * generator_grad
    else:
        weight, gradient = torch.ones_like(parts.rec), nll_grad
        norms = [torch.zeros_like(parts.rec)] * 2
    recorder.clear()

    nll, g = parts.nll.detach(), g.detach()
    known: Tensor = _KnownGradient.apply(recon, gradient, nll + weight * factor * g)  # type: ignore[no-untyped-call]
    vae = VaeLoss(
        nll + parts.kl, nll, parts.kl, parts.rec, parts.perceptual, parts.rec_per_pixel, parts.perceptual_mean
    )
    return VaeGanLoss(known + parts.kl, vae, g, weight, factor, norms[0], norms[1], logits.detach().float().mean())
