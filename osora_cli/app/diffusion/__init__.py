"""`osora train diffusion`."""
