"""Forward and backward over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from trainer.parallel.dropout import Dropout
from trainer.tasks.task import Batch


class ForwardBackward(Protocol):
    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules on this rank: the whole model, or its pipeline stages. Parameters are named
        `model.<name>`.
        """
        ...

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of `scale` x summed loss; return the summed loss of this rank,
        detached.

        `seed` is that of the step's dropout on this data rank.
        """
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the task's measures, summed over this rank's micro-batches, without gradients."""
        ...


class GradientAccumulation:
    """Runs each micro-batch forward and backward through the whole model before the next."""

    def __init__(self, module: nn.Module, dropout: Dropout) -> None:
        # the module inside DDP
        self.modules: list[nn.Module] = [getattr(module, "module", module)]
        self._module = module
        self._dropout = dropout

    def train(self, seed: int, micro_batches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        self._module.train()
        losses = []
        for index, batch in enumerate(micro_batches):
            self._dropout.start(seed, index)
            with self._without_sync() if index + 1 < len(micro_batches) else nullcontext():
                loss = self._module(batch)
                losses.append(loss.detach())
                (loss * scale).backward()
        return sum(losses[1:], losses[0])

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        self._module.eval()
        with torch.no_grad():
            return torch.stack([self._module(batch) for batch in micro_batches]).sum(0)

    def _without_sync(self) -> Any:
        """Keep DDP from reducing until the last micro-batch; FSDP reduces each, so as to hold only
        its shard.
        """
        no_sync = getattr(self._module, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()
