"""The cost of training on a sample, for the plan of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.errors import refused
from trainer.models.flops import counted_flops
from trainer.models.spec import ModelSpec
from trainer.tasks.task import Batch, Task


@dataclass(frozen=True)
class SampleCost:
    """The properties of a sample that the planner's closed forms use."""

    unit: str
    """The unit of rates, in the plural: "tokens", "images", "stories"."""
    units: int
    """The number of them in a sample."""
    kind: str
    """The kind of sample, for the user: "samples of 4,096 tokens"."""
    flops: float
    """FLOPs to train on it, forward and backward, without recomputation (`flops_of_sample`)."""
    hidden: int
    """The number of values in the smallest hidden state that enters a block; 0 if unknown.

    For example sequence length x hidden size.
    """


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
