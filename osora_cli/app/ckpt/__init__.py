"""`osora ckpt`: verify, list, export and prune, as results that print themselves nowhere."""
