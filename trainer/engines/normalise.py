"""Contract 1, in one place: the loss of a step is the sum of its token losses / the number of its
targets.

Engines average gradients over the `batch` reduction; the summed loss of each micro-batch is
multiplied by `gradient_scale`, so that the result is the gradient of this loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch

from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.tasks.task import Batch, Task

AT_ONCE = 16
"""The number of micro-batches of an evaluation that are on the device at a time."""


def counted_here(task: Task, micro_batches: Sequence[Batch], mesh: ParallelMesh) -> torch.Tensor:
    """Count the targets whose loss is on this rank, an int64 scalar; its sum over `loss` is the
    global batch's.
    """
    targets = torch.stack([task.targets(batch) for batch in micro_batches]).sum()
    return targets if mesh.has_loss else torch.zeros_like(targets)


def gradient_scale(targets: torch.Tensor, mesh: ParallelMesh, divided_by: int = 1) -> torch.Tensor:
    """Return the factor of each summed loss, for a global batch with so many targets.

    `divided_by`: the number by which the engine itself divides each micro-batch's loss.
    """
    return mesh.size("batch") * divided_by / targets


def evaluated(
    task: Task,
    mesh: ParallelMesh,
    measured: Callable[[Sequence[Batch]], torch.Tensor],
    micro_batches: Iterable[Batch],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `measured` of each rank's micro-batches, and their targets, over the global batch.
    Collective.
    """
    batches, found = iter(micro_batches), []
    while some := list(islice(batches, AT_ONCE)):
        found.append(
            torch.cat([measured(some).double(), counted_here(task, some, mesh).double()[None]])
        )
    totals = mesh.sum(torch.stack(found).sum(0), "loss")
    return totals[:-1], totals[-1]
