"""Tasks own the collation, the batch's keys and the loss, and know no engine and no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.context_ranks import ContextRanks
from trainer.models.spec import ModelSpec

IGNORED = -100
"""The target of a position that does not count in the loss, as in PyTorch."""

Batch = dict[str, torch.Tensor]
T = TypeVar("T")


Sample = Any
"""A sample of a data set; its recipe alone knows its type."""


class WholeStep(Protocol):
    """The part of a task whose loss compares the outputs of all samples of a step (contrastive).

    An engine then runs each micro-batch of a step twice (GradCache, arXiv 2101.06983): for its
    output, without gradients; and, once `compared` has seen all outputs, for its loss. Both passes
    draw the same random numbers.
    """

    def output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the output that is compared, of the samples of one micro-batch."""

    def compared(
        self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]
    ) -> Sequence[Batch]:
        """Return a step's micro-batches with what `Task.loss_sum` needs to know of all others.

        Collective over the data ranks; `outputs` are those of this rank's micro-batches.
        """

    def measured(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the part of this rank of an evaluation's summed loss, then of each of the
        task's `measures`, over all its micro-batches: [1 + measures]. Collective."""


class Task(Protocol):
    measures: tuple[str, ...]
    """Names of what an evaluation counts besides the loss (accuracy: the correct targets).

    Those that no field of `trainer.trackers.Evaluation` has are logged as metrics, shares of the
    targets; `Supervised.measuring` adds metrics with denominators of their own.
    """

    @property
    def whole_step(self) -> WholeStep | None:
        """Compares the outputs of a step; None: each micro-batch's loss is of its own samples."""

    @property
    def draws(self) -> bool:
        """True if the task itself draws random numbers in training (noise on embeddings)."""

    def regularised(self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float) -> Task:
        """Return the same task with smoothed labels and noise on embeddings, where not 0.

        Raises ConfigError where the task or the model has no such thing.
        """

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        """Note the ranks that share each sequence from now on, a part of each to each rank, and
        those that have the other samples of a step; None: there are no others.

        Ranks of `batch` run their micro-batches at the same time. A loss that compares samples of
        them all gathers with gradients, as by PyTorch's `all_gather_tensor_autograd`; one that
        compares those of all micro-batches is a `WholeStep`.
        """

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model, on the meta device and in place, if the loss requires it."""

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples into one micro-batch of tensors."""

    def blank(self, sample: Sample) -> Sample:
        """Return a sample like this one without a target that counts, to fill up a batch."""

    def shape(self, batch: Batch) -> tuple[int, ...]:
        """Return a key that is equal for micro-batches whose hidden states have the same shapes."""

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        """Return the shape of the hidden state that enters this block of the model."""

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """Pad the micro-batches to one shape: a pipeline sends them through fixed buffers."""

    def targets(self, batch: Batch) -> torch.Tensor:
        """Count the targets of a batch, an int64 scalar on its device."""

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Note this rank's micro-batches of a step, before the first of them.

        `summed` adds a tensor up over all data ranks, in place; collective. A loss of which a part
        is a mean over another number than the targets counts that number here.
        """

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the hidden state that a pipeline stage, except the last, sends to the next."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss over the targets of a batch, float32 or wider."""

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return an evaluation's summed loss, then each of `measures`: [1 + measures]."""


def changed(task: T, **values: object) -> T:
    """Return a copy of a task with other values of its attributes."""
    changed = copy(task)
    vars(changed).update(values)
    return changed


class ModelWithLoss(nn.Module):
    """A model with its loss as one module, so that engines gather parameters around both."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Batch, output: bool = False) -> torch.Tensor:
        """Return the micro-batch's loss, in evaluation with its measures; or the `output` that the
        task compares with those of the other micro-batches."""
        if output:
            assert self._task.whole_step is not None
            return self._task.whole_step.output(self.model, batch)
        compute = self._task.loss_sum if self.training else self._task.measured
        return compute(self.model, batch)


def bare_name(name: str) -> str:
    """Return the Hugging Face name of a parameter of a `ModelWithLoss`."""
    return name.removeprefix("model.")
