"""The task: cross entropy over labelled tokens, and the share of labels that score highest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.tasks.supervised import Supervised
from trainer.tasks.task import IGNORED, Batch


class Labelling(Supervised):
    measures = ("accuracy",)

    def __init__(self, build: Callable[[], nn.Module], blocks: Sequence[str]) -> None:
        super().__init__(self.loss, build, blocks)

    @staticmethod
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return the summed loss of scores [batch, sequence, labels], and the number of labels."""
        flat = scores.float().flatten(0, 1)
        total = cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        scores, labels = self.output(model, batch), batch["target"]
        right = ((scores.argmax(-1) == labels) & (labels != IGNORED)).sum()
        return torch.stack([self.loss(scores, labels)[0], right]) * batch["share"]
