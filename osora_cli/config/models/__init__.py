"""Config sections of the models, one file each, told apart by `type`."""
