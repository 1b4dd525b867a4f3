"""What a training would take, found without a GPU, without weights in memory, and without a step."""
