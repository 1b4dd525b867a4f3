"""What this machine can do for a training, and what would have to be cured first."""
