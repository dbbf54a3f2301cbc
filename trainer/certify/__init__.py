"""The parity certificate: the user's own config, made small, against plain PyTorch in one process."""
