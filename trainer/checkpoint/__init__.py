"""Checkpoints: written beside the last good one, hashed, visible in one rename, open to plain `transformers`."""

from __future__ import annotations

from trainer.checkpoint.disk import ensure_writable
from trainer.checkpoint.load import load, read_description
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.save import export, save
from trainer.checkpoint.shelf import newest, prune, published, step_name

__all__ = [
    "ensure_writable",
    "export",
    "load",
    "newest",
    "prune",
    "published",
    "read_description",
    "save",
    "step_name",
    "verify",
]
