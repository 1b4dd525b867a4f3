"""osora: train video autoencoders and video diffusion models from one command line."""

__version__ = "0.1.0"
