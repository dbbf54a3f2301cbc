"""`Task`: what is trained. Owns the collation, the batch's keys and the loss; knows no engine and no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class Task(Protocol):
    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on the meta device, changed in place where the loss needs it to be."""
        ...

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Samples of the data as one micro-batch of tensors."""
        ...

    def shape(self, batch: Batch) -> tuple[int, int]:
        """[batch, sequence]: the first sizes of every hidden state."""
        ...

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """The same micro-batches in one shape, with no target more."""
        ...

    def targets(self, batch: Batch) -> torch.Tensor:
        """How many targets the batch has, an int64 scalar."""
        ...

    def below_head(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the head would see, [batch, sequence, hidden]: what a pipeline stage sends on."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss summed over the targets, in nats, a float32 scalar."""
        ...


class Trainee(nn.Module):
    """A model together with its loss: one forward call of it is all that an engine has to wrap.

    Parameters are named `model.<name>`; `bare_name` gives the Hugging Face name back.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._task.loss_sum(self.model, batch)


def bare_name(name: str) -> str:
    return name.removeprefix("model.")
