"""The pipeline stages of this rank, made of the model that the job names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from trainer.engines.engine import Job
from trainer.engines.homes import place_of
from trainer.errors import ConfigError, Problem
from trainer.models.cut import cut, prove
from trainer.models.spec import ModelSpec
from trainer.parallel import partition, recompute, tensor
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import Grid
from trainer.parallel.pipeline import Stage


def stages_of_rank(job: Job, grid: Grid, place: Callable[[Stage, ModelSpec], None]) -> tuple[list[Stage], str]:
    """The stages of this rank, and a line on how the model was cut.

    `place` gives a stage on the meta device its values; the spec that it is told has the stage's blocks alone.
    """
    layout, spec = job.layout, job.spec
    anatomy = job.machine.ranks.on_first(lambda: prove(spec, layout.stages))
    parts = partition.parts(spec.build(), spec, layout.partition, layout.stages)
    stages = []
    for index in partition.stages_of(layout, place_of(grid)):
        model, dropout = model_of(job, grid)
        inlet = cut(model, spec, anatomy, parts[index])
        stage = Stage(model, job.task, inlet, dropout, last=index + 1 == layout.stages)
        place(stage, replace(spec, blocks=tuple(spec.blocks[i] for i in parts[index])))
        stages.append(stage)
    blocks = " | ".join(str(len(part)) for part in parts)
    bubble = (layout.pipeline - 1) / (layout.accumulation * layout.schedule.stages_per_rank + layout.pipeline - 1)
    note = f"{layout.stages} pipeline stages of {blocks} blocks; idle for about {bubble:.0%} of a step by {{}}"
    return stages, note.format(layout.schedule.name)


def model_of(job: Job, grid: Grid) -> tuple[nn.Module, Dropout]:
    """The whole model on the meta device, with all that is done to a block's forward."""
    model = job.task.prepare(job.spec.build())
    recompute.apply(model, job.spec, job.layout.recompute)
    if job.layout.tensor > 1:
        tensor.apply(model, job.spec, grid)
    return model, Dropout(model, job.spec)


def hidden_size(spec: ModelSpec) -> int:
    """The width of what goes from stage to stage."""
    if spec.hidden_size is None:
        raise ConfigError(Problem(f"pipeline.stages: {spec.name}", "no hidden size", "a transformer"))
    return spec.hidden_size
