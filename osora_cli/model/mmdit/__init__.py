"""MMDiT, the diffusion transformer over video latents (Esser et al. 2024, arXiv:2403.03206)."""

from osora_cli.model.mmdit.model import MMDiT

__all__ = ["MMDiT"]
