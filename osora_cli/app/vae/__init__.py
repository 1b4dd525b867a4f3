"""`osora train vae` and `osora train vae-disc`."""
