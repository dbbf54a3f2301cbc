"""Checkpoints: hashed, published by one rename, and readable by `transformers`."""

from __future__ import annotations

from trainer.checkpoint.background import Background
from trainer.checkpoint.directory import DAMAGED, leftovers, newest, prune, published, step_of
from trainer.checkpoint.load import load
from trainer.checkpoint.manifest import ALL, PICKLES, WEIGHTS_ALONE, read_description, verify
from trainer.checkpoint.save import ModelFolder, export, save
from trainer.checkpoint.slots import ModelForm
from trainer.checkpoint.strangers import strangers

__all__ = ["Background", "ModelFolder", "ModelForm", "export", "load", "save"]
__all__ += ["leftovers", "newest", "prune", "published", "read_description", "step_of", "strangers"]
__all__ += ["ALL", "DAMAGED", "PICKLES", "WEIGHTS_ALONE", "verify"]
