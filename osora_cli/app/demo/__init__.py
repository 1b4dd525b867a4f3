"""`osora demo`: the whole path on this machine in minutes, on real clips."""
