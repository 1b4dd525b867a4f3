"""Video DC-AE: deep-compression autoencoder for clips. padding.py takes clips of any size through it."""
