"""The step that all engines share: its loss is the sum of token losses / the number of targets.

Engines average gradients over the `batch` reduction; the summed loss of each micro-batch is
multiplied by `gradient_scale`, so that the result is the gradient of this loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from trainer.distributed.seeding import step_seed
from trainer.engines.engine import Job, Metrics, Observer
from trainer.optim.lr_schedules import Update
from trainer.optim.optimizer import set_update
from trainer.parallel import compilation
from trainer.parallel.batch_norm import RunningStatistics
from trainer.parallel.forward_backward import ForwardBackward, RunsAhead
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.parallel.splits.expert_loads import ExpertLoads
from trainer.state import StateTensor
from trainer.tasks.task import Batch, Task, WholeStep

AT_ONCE = 16
"""The number of micro-batches of an evaluation that are on the device at a time."""


def counted_here(task: Task, micro_batches: Sequence[Batch], mesh: ParallelMesh) -> torch.Tensor:
    """Count the targets whose loss is on this rank, an int64 scalar to be summed over `loss`."""
    targets = torch.stack([task.targets(batch) for batch in micro_batches]).sum()
    return targets if mesh.has_loss else torch.zeros_like(targets)


def gradient_scale(targets: torch.Tensor, mesh: ParallelMesh, divided_by: int = 1) -> torch.Tensor:
    """Return the factor of each summed loss, for a global batch with so many targets.

    `divided_by`: the number by which the engine itself divides each micro-batch's loss.
    """
    return mesh.size("batch") * divided_by / targets


class TrainingState(Protocol):
    """Reads and writes the weights and the optimizer's state."""

    def state_tensors(self) -> list[StateTensor]: ...

    def gradients(self, observe: Observer) -> None:
        """Call `observe` with every gradient, whole and unscaled, on every rank. Collective."""

    def scalars(self) -> dict[str, float]: ...

    def restore(self, scalars: Mapping[str, float]) -> None: ...


class NormalisedEngine(ABC):
    """The part of an `Engine` that all share; a subclass updates the weights."""

    divided_by = 1
    """The number by which the library divides each micro-batch's loss."""

    def __init__(
        self,
        job: Job,
        mesh: ParallelMesh,
        runner: ForwardBackward,
        optimizer: Any,
        state: TrainingState,
        notes: tuple[str, ...],
    ) -> None:
        self.job = job
        self.notes = notes
        self._mesh = mesh
        self._runner = runner
        self._optimizer = optimizer
        self._state = state
        self._observe: Observer | None = None
        self._clip = float(job.deepspeed["gradient_clipping"])
        self._statistics = RunningStatistics(runner.modules, mesh, job.data_rank)
        self._loads = ExpertLoads(runner.modules, job.spec, job.task, mesh)
        compiles = job.layout.compile in ("blocks", "loss")
        self._reports = compilation.Reports(job.machine) if compiles else None

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        update: Update,
        observe: Observer | None = None,
    ) -> Metrics:
        job = self.job
        mesh = self._mesh
        self._observe = observe
        set_update(self._optimizer.param_groups, update)
        seed = step_seed(job.seed, step, job.data_rank)
        if job.one_width:
            micro_batches = job.task.padded(micro_batches)
        with mesh.dividing_rows():
            # awaited before the first backward pass: no forward pass waits for the slowest rank
            targets = mesh.begin_sum(counted_here(job.task, micro_batches, mesh), "loss")
            job.task.started(micro_batches, lambda counts: mesh.sum(counts, "batch"))
            scale = cache(lambda: gradient_scale(targets(), mesh, self.divided_by))
            if job.task.whole_step is not None:
                outputs = self._ahead().outputs(seed, micro_batches)
                micro_batches = job.task.whole_step.compared(micro_batches, outputs)
            with self._statistics.of_step(len(micro_batches)):
                loss_sum = self._runner.train(seed, micro_batches, scale)
            norm, skipped = self._finish()
            self._loads.move(norm, skipped)
        return Metrics(loss_sum, targets(), norm, skipped, mesh.group("loss"))

    @abstractmethod
    def _finish(self) -> tuple[torch.Tensor, bool]:
        """Update the weights if `train` did not; return the norm, and True for a skipped step."""

    def _ahead(self) -> RunsAhead:
        """Return what runs micro-batches for their outputs; a layout without it is refused."""
        assert isinstance(self._runner, RunsAhead)
        return self._runner

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        batches = iter(micro_batches)
        mesh = self._mesh
        if (whole := self.job.task.whole_step) is not None:
            return self._compared(whole, batches)
        sums = []
        while part := list(islice(batches, AT_ONCE)):
            with mesh.dividing_rows():
                targets = counted_here(self.job.task, part, mesh).double()
                sums.append(torch.cat([self._runner.evaluate(part).double(), targets[None]]))
        totals = mesh.sum(torch.stack(sums).sum(0), "loss")
        return totals[:-1], totals[-1]

    def _compared(
        self, whole: WholeStep, batches: Iterator[Batch]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate outputs that are compared with one another: all are kept until the end."""
        every = list[Batch]()
        outputs = list[torch.Tensor]()
        with self._mesh.dividing_rows():
            while part := list(islice(batches, AT_ONCE)):
                outputs += self._ahead().outputs(None, part)
                every += part
            targets = counted_here(self.job.task, every, self._mesh).double()
            measured = whole.measured(every, outputs).double()
        totals = self._mesh.sum(torch.cat([measured, targets[None]]), "loss")
        return totals[:-1], totals[-1]

    def state_tensors(self) -> list[StateTensor]:
        return self._state.state_tensors()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._runner.modules

    def close(self) -> None:
        if self._reports is not None:
            self._reports.close()
