"""`osora data cache` and `osora data latent-stats`: latents and text embeddings made once, and what reads them."""
