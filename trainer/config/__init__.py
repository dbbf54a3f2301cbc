"""The config compiler: a DeepSpeed JSON in, a checked `Config` out. Knows no torch."""

from __future__ import annotations

from trainer.config.compiled import Choice, Config, load
from trainer.config.mesh import MeshSizes, mesh_sizes
from trainer.config.read import leaves
from trainer.config.resolve import Facts, origin_table, resolve
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    GenerateSection,
    LogSection,
    MeshSection,
    ModelSection,
    RunSection,
    TrainerSection,
)

__all__ = [
    "CheckpointSection",
    "Choice",
    "Config",
    "DataSection",
    "EvaluationSection",
    "Facts",
    "GenerateSection",
    "LogSection",
    "MeshSection",
    "MeshSizes",
    "ModelSection",
    "RunSection",
    "TrainerSection",
    "leaves",
    "load",
    "mesh_sizes",
    "origin_table",
    "resolve",
]
