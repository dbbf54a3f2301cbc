"""`Task`: what is trained. Owns the collation, the batch's keys and the loss; knows no engine and no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

IGNORED = -100
"""The target of a position that does not count in the loss, as PyTorch has it."""

Batch = dict[str, torch.Tensor]


class Task(Protocol):
    measures: tuple[str, ...]
    """What an evaluation counts beside the loss, by name: of the targets, how many (accuracy: the right ones)."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on the meta device, changed in place where the loss needs it to be."""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples of the data as one micro-batch of tensors."""
        ...

    def blank(self, sample: Any) -> Any:
        """A sample like this one of which no target counts: it fills up where there are none left."""
        ...

    def shape(self, batch: Batch) -> tuple[int, ...]:
        """Equal for micro-batches whose hidden states have the same shapes."""
        ...

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        """Of the hidden state that enters this block of the model."""
        ...

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches in one shape: a pipeline sends them through buffers."""
        ...

    def targets(self, batch: Batch) -> torch.Tensor:
        """How many targets a batch has, an int64 scalar on its device."""
        ...

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What a pipeline stage that is not the last gives to the next."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss over the targets of a batch, float32 or wider."""
        ...

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """In an evaluation: that sum, then each of `measures`, [1 + measures]."""
        ...


class ModelWithLoss(nn.Module):
    """A model with its loss as one module: what engines wrap, so that parameters are gathered around both."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self._task.loss_sum if self.training else self._task.measured
        return found(self.model, batch)


def bare_name(name: str) -> str:
    """The Hugging Face name of a parameter of a `ModelWithLoss`."""
    return name.removeprefix("model.")
