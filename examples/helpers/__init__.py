"""What the scripts share: the command line, data, networks, optimizers, checkpoints."""
