"""The config compiler: `compiled.load` makes a `Config` of a DeepSpeed JSON. Imports no torch."""

from __future__ import annotations

from trainer.config import support
from trainer.config.axes import MeshSizes, mesh_sizes, secondary_shard
from trainer.config.compiled import Choice, Config, load
from trainer.config.read import leaves, shipped
from trainer.config.resolve import (
    RECOMPUTE,
    RuntimeFacts,
    origin_table,
    recompute_note,
    recomputing,
    resolve,
)
from trainer.config.sections.images import AugmentSection, ImagesSection
from trainer.config.sections.model_and_data import DataSection
from trainer.config.sections.trainer import TrainerSection

__all__ = ["Choice", "Config", "MeshSizes", "RuntimeFacts", "leaves", "load", "mesh_sizes"]
__all__ += ["origin_table", "resolve", "shipped", "support", "TrainerSection"]
__all__ += [
    "AugmentSection",
    "DataSection",
    "ImagesSection",
    "RECOMPUTE",
    "recompute_note",
    "recomputing",
    "secondary_shard",
]
