"""Checkpoints: written beside the last good one, hashed, published by one rename, and readable by
`transformers`.
"""

from __future__ import annotations

from trainer.checkpoint.background import Background
from trainer.checkpoint.directory import (
    DAMAGED,
    check_same,
    leftovers,
    newest,
    prune,
    published,
    step_name,
    step_of,
)
from trainer.checkpoint.load import load
from trainer.checkpoint.manifest import ALL, PICKLES, WEIGHTS_ALONE, read_description, verify
from trainer.checkpoint.save import export, save
from trainer.storage import ensure_writable

__all__ = [
    "ALL",
    "Background",
    "DAMAGED",
    "PICKLES",
    "WEIGHTS_ALONE",
    "check_same",
    "ensure_writable",
]
__all__ += [
    "export",
    "leftovers",
    "load",
    "newest",
    "prune",
    "published",
    "read_description",
    "save",
]
__all__ += ["step_name", "step_of", "verify"]
