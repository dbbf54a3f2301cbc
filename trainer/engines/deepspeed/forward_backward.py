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
from trainer.parallel.mesh import ParallelMesh
from trainer.tasks.task import Batch


@dataclass(frozen=True)
class Step:
    """What a step needs beside its micro-batches."""

    seed: int
    """Of dropout, on this data rank."""
    scale: Callable[[], torch.Tensor]
    """What each summed loss is multiplied by. Waits until it is known."""
    before_update: Callable[[], None]
    """To be called when the gradients are there, averaged."""


class StepRunner(Protocol):
    engine: Any
    """`deepspeed.DeepSpeedEngine`"""
    module: nn.Module
    """What this rank holds: the whole model, its shard of each matrix, or its pipeline stage."""
    mesh: ParallelMesh
    split: Split | None
    notes: tuple[str, ...]

    @property
    def blank(self) -> tuple[nn.Module, ModelSpec]:
        """What this rank holds, or has a shard of, on the meta device, and its spec."""
        ...

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        """One optimizer step; returns the summed loss that this rank saw, detached."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """What the task measured, summed over what this rank saw, without gradients."""
        ...


class AccumulatedStep:
    """Each micro-batch forward and backward through all blocks, before the next."""

    def __init__(self, engine: Any, job: Job, dropout: Dropout, mesh: ParallelMesh, split: Split | None) -> None:
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
            # it has begun to gather weights for a backward pass that does not come, and refuses to have them read
            self.engine.optimizer.empty_partition_cache()
        return measured
