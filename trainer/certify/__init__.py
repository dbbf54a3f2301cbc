"""The parity certificate: a comparison of the user's config, in small, with plain PyTorch in one
process.
"""
