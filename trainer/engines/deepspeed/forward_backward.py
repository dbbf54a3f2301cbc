"""Forward, backward and update of one optimizer step through DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainer.engines.deepspeed import tensor
from trainer.engines.deepspeed.tensor import Split
from trainer.engines.engine import Job
from trainer.models.spec import ModelSpec
from trainer.parallel.dropout import Dropout
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.tasks.task import Batch


@dataclass(frozen=True)
class Step:
    """The inputs of a step besides its micro-batches."""

    seed: int
    """The seed of dropout on this data rank."""
    scale: Callable[[], torch.Tensor]
    """Returns the factor of each summed loss; waits until it is known."""
    before_update: Callable[[], None]
    """A callback for when the gradients are complete and averaged."""


class StepRunner(Protocol):
    engine: Any
    """The `deepspeed.DeepSpeedEngine`."""
    module: nn.Module
    """The module on this rank: the whole model, its tensor parallel shard, or its pipeline
    stage.
    """
    mesh: ParallelMesh
    split: Split | None
    notes: tuple[str, ...]

    @property
    def blank(self) -> tuple[nn.Module, ModelSpec]:
        """This rank's model or stage, unsharded, on the meta device, and its spec."""
        ...

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        """Run one optimizer step; return the summed loss of this rank's micro-batches, detached."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the task's measures, summed over this rank's micro-batches, without gradients."""
        ...


class AccumulatedStep:
    """A step that runs each micro-batch forward and backward through all blocks before the next."""

    def __init__(
        self, engine: Any, job: Job, dropout: Dropout, mesh: ParallelMesh, split: Split | None
    ) -> None:
        self.engine = engine
        self._job = job
        self.module: nn.Module = engine.module
        self.mesh = mesh
        self.split = split
        self.notes: tuple[str, ...] = (tensor.NOTE,) if split else ()
        self._dropout = dropout

    @property
    def blank(self) -> tuple[nn.Module, ModelSpec]:
        return self._job.spec.build(), self._job.spec

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        if not self.module.training:
            self.engine.train()
        losses = []
        for index, batch in enumerate(micro_batches):
            self._dropout.start(step.seed, index)
            loss = self.engine(batch)
            losses.append(loss.detach())
            self.engine.backward(loss * step.scale())
            if index + 1 == len(micro_batches):
                step.before_update()
            self.engine.step()
        return sum(losses[1:], losses[0])

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        self.engine.eval()
        with torch.no_grad():
            measured = torch.stack([self.engine(batch) for batch in micro_batches]).double().sum(0)
        if self._job.layout.zero_stage == 3:
            # it has prefetched weights for a backward pass that does not follow, and would refuse
            # to have them read
            self.engine.optimizer.empty_partition_cache()
        return measured
