"""Meshloom: trains large transformer models from a DeepSpeed JSON config."""

__version__ = "0.1.0"
