"""The FLOPs of training on a sample, for the plan of a recipe."""

from __future__ import annotations

from collections.abc import Callable

from trainer.errors import refused
from trainer.models.flops import counted_flops
from trainer.models.spec import ModelSpec
from trainer.tasks.task import Batch, Task


def flops_of_sample(spec: ModelSpec, task: Task, batch: Callable[[int], Batch]) -> float:
    """Count the FLOPs of training on one sample, on the meta device.

    It is half of two samples' FLOPs, as batch norm has no statistics of one. Raises ConfigError for
    a model that does not run so.
    """
    two = {name: part.to("meta") for name, part in batch(2).items()}
    expected = "a forward and a backward pass in training that read no values"
    start = "its training fails on the meta device: "
    # whatever the model's own code raises
    with refused(f"trainer.model: {spec.name}", expected, named=True, start=start):
        return counted_flops(spec, lambda model: task.loss_sum(task.prepare(model), two)) / 2
