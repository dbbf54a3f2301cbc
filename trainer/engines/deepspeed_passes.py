"""Forward, backward and update of one optimizer step through DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainer.engines import deepspeed_tensor
from trainer.engines.deepspeed_tensor import Split
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import Grid
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


class Passes(Protocol):
    engine: Any
    """`deepspeed.DeepSpeedEngine`"""
    trainee: nn.Module
    """What this rank holds: the whole model, its part of each matrix, or its pipeline stage."""
    grid: Grid | None
    """None where all ranks are data ranks."""
    split: Split | None
    notes: tuple[str, ...]

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        """One optimizer step; returns the summed loss that this rank saw, detached."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """The summed loss that this rank saw, without gradients."""
        ...


class Whole:
    """Each micro-batch forward and backward through all blocks, before the next."""

    def __init__(self, engine: Any, dropout: Dropout, grid: Grid | None, split: Split | None) -> None:
        self.engine = engine
        self.trainee: nn.Module = engine.module
        self.grid = grid
        self.split = split
        self.notes: tuple[str, ...] = (deepspeed_tensor.NOTE,) if split else ()
        self._dropout = dropout

    def train(self, micro_batches: Sequence[Batch], step: Step) -> torch.Tensor:
        if not self.trainee.training:
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
            return torch.stack([self.engine(batch) for batch in micro_batches]).double().sum()
