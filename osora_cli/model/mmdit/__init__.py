"""MMDiT, the diffusion transformer over video latents (models.md 2)."""

from osora_cli.model.mmdit.model import MMDiT

__all__ = ["MMDiT"]
