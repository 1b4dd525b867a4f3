"""`osora infer reconstruct`: clips through an autoencoder and back, in pieces, over ranks, with scores and pictures."""
